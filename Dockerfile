# syntax=docker/dockerfile:1
# ftkit and the examples, on CPU. For GPUs: docker build --build-arg TORCH_INDEX=https://pypi.org/simple .
FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1

WORKDIR /app

# What is large and changes seldom comes first. The index's own build of the pinned release (2.x.y+cpu) is preferred.
COPY constraints.txt ./
RUN pip install -c constraints.txt --extra-index-url "$TORCH_INDEX" \
    torch numpy etcd3 grpcio msgspec protobuf safetensors tenacity xxhash rich matplotlib

COPY pyproject.toml README.md LICENSE ./
COPY ftkit ftkit
COPY transport transport
COPY scripts scripts
RUN pip install -c constraints.txt '.[examples]'

RUN useradd --create-home trainer
USER trainer

CMD ["ftkit", "--help"]
