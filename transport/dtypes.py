"""Names of the dtypes, in manifests and in safetensors files.

Knows no layout. A dtype that safetensors has no code for travels as bytes (`U8`) in the file; its true
name is in the manifest.
"""

from __future__ import annotations

from typing import Final

import torch

_CODES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "complex128": None,
    "float4_e2m1fn_x2": None,
}

DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in _CODES if isinstance(getattr(torch, name, None), torch.dtype)
}
"""Name in a manifest -> dtype, for those that this version of torch has."""

NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}

ITEMSIZES: Final[dict[str, int]] = {name: dtype.itemsize for name, dtype in DTYPES.items()}


def codes() -> dict[str, str]:
    """Return the name in a manifest of each code of safetensors that this version of torch has."""
    return {code: name for name, code in _CODES.items() if code is not None and name in DTYPES}


def safetensors_code(name: str) -> str | None:
    """Return the code of a dtype in safetensors files, or None when the format has none."""
    return _CODES.get(name)
