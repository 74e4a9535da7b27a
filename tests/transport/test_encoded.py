"""What goes through `encode` and `decode` comes out bit for bit, and the file is one that others can read."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.optim import lr_scheduler

from transport import MalformedState, UnsupportedState, decode, encode
from transport.dtypes import DTYPES

Same = Callable[[Any, Any], None]


def round_trip(state: object) -> Any:
    return decode(encode(state).tobytes())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (5, 7), (2, 3, 4)])
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, shape: tuple[int, ...], assert_same: Same) -> None:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    result = round_trip({"t": tensor})
    assert result["t"].dtype is dtype
    assert result["t"].shape == tensor.shape
    assert_same(
        result["t"].reshape(-1).view(torch.uint8) if count else result["t"].shape,
        tensor.reshape(-1).view(torch.uint8) if count else tensor.shape,
    )


def test_what_a_training_script_saves_comes_back(assert_same: Same) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    schedule = lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        milestones=[3],
    )
    model(torch.randn(5, 6)).sum().backward()
    optimizer.step()
    schedule.step()
    multi = lr_scheduler.MultiStepLR(optimizer, [2, 4])
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": {k: v for k, v in schedule.state_dict().items() if k != "_schedulers"},
        "multi": multi.state_dict(),
        "plateau": lr_scheduler.ReduceLROnPlateau(optimizer).state_dict(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(1).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    result = round_trip(state)
    assert_same(result, state)
    assert result["model"]._metadata == model.state_dict()._metadata
    random.setstate(result["python"])
    np.random.set_state(result["numpy"])
    torch.set_rng_state(result["torch"])
    model.load_state_dict(result["model"])
    optimizer.load_state_dict(result["optimizer"])


def test_everything_that_is_no_tensor_comes_back(assert_same: Same) -> None:
    counter = collections.Counter("abracadabra")
    grouped: collections.defaultdict[str, list[int]] = collections.defaultdict(list, {"a": [1]})
    state = {
        "numbers": [0, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**6000, True, False, None],
        "floats": [0.0, -0.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"), 1.0],
        "complex": [1 + 2j, complex(float("nan"), -0.0)],
        "text": ["", "ä", "\ud800", "a/b", "\x00", "T"],
        "bytes": [b"", b"\xff" * 3000, bytearray(b"x"), bytearray(5000)],
        5: {(1, "a", None): 1, None: 2, 1.5: 3, b"k": 4, True: 5, frozenset({1}): 6, "\udcff": 7},
        "sets": [{3, 1, 2}, frozenset({"b", "a"}), set()],
        "containers": [counter, grouped, collections.OrderedDict(b=1, a=2), collections.deque([1, 2], 5),
                       (), [], {}],
        "numpy": [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("x"), np.datetime64("2024-01-01"),
                  np.arange(6).reshape(2, 3).T, np.array(5), np.empty((0, 2)), np.array(["ab", "c"]),
                  np.arange(3, dtype=">i4")],
        "torch": [torch.float8_e5m2, torch.device("cuda:1"), torch.Size([1, 2])],
        "odd": [range(1, 9, 2), slice(None, 3)],
        "lookalikes": [["T", 0], ["l"], {"T": [["n", 1, 2]]}],
    }  # fmt: skip
    assert_same(round_trip(state), state)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=2000),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(plain)
def test_any_nesting_of_plain_values_comes_back(assert_same: Same, state: Any) -> None:
    assert_same(round_trip(state), state)
    assert encode(state).tobytes() == encode(round_trip(state)).tobytes()


def test_shared_memory_is_sent_once_and_stays_shared() -> None:
    weight = torch.randn(100, 10)
    state = {"in": weight, "out": weight, "row": weight[3], "transposed": weight.t()}
    encoded = encode(state)
    assert encoded.size == weight.numel() * 4
    result = decode(encoded.tobytes())
    result["in"][3, 4] = 77
    assert result["out"][3, 4] == result["row"][4] == result["transposed"][4, 3] == 77


def test_only_referenced_bytes_of_a_storage_are_sent() -> None:
    flat = torch.arange(1000.0)
    state = {"a": flat[10:20], "b": flat[20:40], "gap": flat[900:901]}
    assert encode(state).size == 31 * 4
    columns = torch.arange(60.0).reshape(6, 10)
    state = {"even": columns[:, ::2], "first": columns[:, :3], "one": columns[:, 0]}
    encoded = encode(state)
    assert encoded.size == 6 * 6 * 4  # columns 0, 1, 2, 4, 6, 8
    result = decode(encoded.tobytes())
    for name, tensor in state.items():
        assert torch.equal(result[name], tensor)
    result["one"][2] = -1
    assert result["even"][2, 0] == result["first"][2, 0] == -1


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.t(),
        lambda t: t[::2],
        lambda t: t[:, 1:3],
        lambda t: t[0].expand(4, 8),
        lambda t: t.as_strided((5, 4), (1, 1)),
        lambda t: t[::2, :1].expand(3, 4),
        lambda t: t.view(torch.int32)[1:, ::3],
        lambda t: torch.view_as_complex(t.view(6, 4, 2)).conj(),
        lambda t: torch.view_as_complex(t.view(6, 4, 2)).conj().imag,
    ],
)
def test_strided_tensors_keep_their_values(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = make(torch.randn(6, 8))
    assert torch.equal(round_trip([tensor])[0], tensor)
    into = [torch.zeros(tensor.shape, dtype=tensor.dtype)]
    result: Any = decode(encode([tensor]).tobytes(), into)
    assert result[0] is into[0]
    assert torch.equal(into[0], tensor)


def test_equal_states_give_equal_bytes() -> None:
    """Otherwise sources of one version could not be striped over."""

    def build(shared: bool) -> dict[str, Any]:
        flat = torch.arange(48.0)
        a, b = (flat[:24], flat[24:]) if shared else (flat[:24].clone(), flat[24:].clone())
        return {"a": a.view(4, 6), "b": b, "holes": torch.arange(10)[::3], "s": {"x", "y", "z"}, "n": 1.5}

    assert encode(build(False)).tobytes() == encode(build(False)).tobytes()
    assert encode(build(False)).manifest.etag == encode(build(True)).manifest.etag
    left, right = build(False), build(False)
    right = dict(reversed(right.items()))
    assert encode(left).manifest.etag == encode(right).manifest.etag, "the order of keys moves no bytes"


def test_the_file_is_valid_safetensors(tmp_path: Path) -> None:
    tied = torch.randn(3, 2)
    state = {
        "f": torch.randn(4, 5),
        "h": torch.randn(3).to(torch.bfloat16),
        "t": torch.randn(4, 6).t(),
        "holes": torch.arange(12).reshape(3, 4)[:, ::2],
        "empty": torch.empty(0, 3),
        "zero": torch.tensor(True),
        "eight": torch.randn(4).to(torch.float8_e4m3fn),
        "c": torch.randn(2, dtype=torch.complex128),
        "tied": [tied, tied],
        "__metadata__": torch.ones(1),
        "a": {"b": torch.ones(2)},
        "a/b": torch.zeros(2),
    }
    path = tmp_path / "x.safetensors"
    encode(state).write(path)
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("f"), state["f"])
        assert torch.equal(file.get_tensor("h"), state["h"])
        assert torch.equal(file.get_tensor("t"), state["t"].t()), "as it lies in memory"
        assert torch.equal(file.get_tensor("holes"), state["holes"])
        assert file.get_tensor("empty").shape == (0, 3)
        assert file.get_tensor("zero").item() is True
        assert file.get_tensor("eight").dtype == torch.float8_e4m3fn
        assert torch.equal(file.get_tensor("tied/0"), tied)
        assert "tied/1" not in file.keys()  # noqa: SIM118
    assert torch.equal(decode(path.read_bytes())["a/b"], state["a/b"])


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, lambda: 0]}, "a/1"),
        ({"lr": {"lambdas": [print]}}, "lr/lambdas/0"),
        ({"o": object()}, "o"),
        ({"x": {torch.ones(1): 1}}, "x"),
        ({"x": torch.eye(2).to_sparse()}, "x"),
        ({"x": np.array([object()])}, "x"),
        ({"m": torch.empty(2, device="meta")}, "m"),
        ({"d": collections.defaultdict(lambda: 0)}, "d"),
        ({"e": [type("Sub", (dict,), {})()]}, "e/0"),
    ],
)
def test_what_cannot_be_encoded_is_a_type_error_that_names_the_path(value: Any, where: str) -> None:
    with pytest.raises(TypeError, match=f"state at {where}") as caught:
        encode(value)
    assert isinstance(caught.value, UnsupportedState)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(UnsupportedState, match="contains itself"):
        encode(state)


def test_a_scheduler_with_a_function_object_is_refused_by_name() -> None:
    class Warmup:
        def __call__(self, epoch: int) -> float:
            return 1.0

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    schedule = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    round_trip(schedule.state_dict())  # functions are left out by torch itself
    with pytest.raises(UnsupportedState, match="warmup"):
        encode({"warmup": Warmup()})


@pytest.mark.parametrize("cut", [0, 4, 9, 300, -1])
def test_a_truncated_file_is_an_error(cut: int) -> None:
    raw = encode({"a": torch.ones(100)}).tobytes()
    with pytest.raises(MalformedState):
        decode(raw[:cut])


def test_a_file_of_somebody_else_is_an_error() -> None:
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    with pytest.raises(MalformedState, match="written by this package"):
        decode(len(header).to_bytes(8, "little") + header + b"x")


def test_parameters_are_sent_without_their_graph() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    result = round_trip([parameter, parameter * 2])
    assert torch.equal(result[0], parameter.detach())
    assert not result[1].requires_grad
