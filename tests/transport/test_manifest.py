"""A hostile manifest is refused before a byte is allocated for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from transport import MalformedState, encode
from transport.manifest import dump, parse
from transport.place import Plan

HUGE = 1 << 50


def good() -> dict[str, Any]:
    flat = torch.arange(20.0)
    state = {"a": torch.ones(4, 5), "b": [flat, flat[2:4]], "c": torch.arange(9)[::2], "n": b"x" * 2000}
    result: dict[str, Any] = json.loads(dump(encode(state, version="v").manifest))
    return result


def refuse(manifest: dict[str, Any]) -> None:
    with pytest.raises(MalformedState):
        Plan(parse(json.dumps(manifest).encode()), {})


def test_the_unchanged_manifest_is_accepted() -> None:
    Plan(parse(json.dumps(good()).encode()), {})


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(manifest: dict[str, Any]) -> None:
        target: Any = manifest
        *parents, last = path.split(".")
        for key in parents:
            target = target[int(key) if isinstance(target, list) else key]
        target[int(last) if isinstance(target, list) else last] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", 2), ("algo", "md5"), ("size", -1), ("size", HUGE), ("chunk", 0), ("chunk", -5),
        ("chunk", HUGE),
        ("chunk", 1), ("etag", 5), ("version", None), ("hashes", "ff"), ("tensors", {}), ("blocks", []),
        ("blocks.0.0", 5), ("blocks.0.1", -80), ("blocks.0.1", HUGE), ("blocks.0.1", 79),
        ("blocks.0.2", "zip"),
        ("blocks.0.2", "mask"), ("blocks.2.2", "rows"), ("tensors.3.3", [9]), ("blocks.1.0", 0),
        ("blocks.0.1", 1.5), ("blocks.0", [0]),
        ("tensors.0.1", "object"), ("tensors.0.1", "float64"), ("tensors.0.2", [4, 6]),
        ("tensors.0.2", [-4, -5]),
        ("tensors.0.2", [1 << 40, 1 << 40]), ("tensors.0.2", [1] * 70), ("tensors.0.3", [5]),
        ("tensors.0.3", [6, 1]),
        ("tensors.0.3", [-5, 1]), ("tensors.0.3", [HUGE, 1]), ("tensors.0.4", 99), ("tensors.0.4", -1),
        ("tensors.0.5", 4), ("tensors.0.5", -4), ("tensors.0.5", 2), ("tensors.0.5", HUGE),
        ("tree", []), ("tree", ["T", 0]), ("tree", {"a": ["T", 99]}), ("tree.a", ["T", -1]),
        ("tree.a", ["T", "x"]),
        ("tree.a", ["T"]), ("tree.a", ["T", 1]), ("tree.n", ["n", 4, "O", [1]]), ("tree.n", ["n", 4,
        "<f8", [1 << 60]]),
        ("tree.n", ["n", 4, "<f4", [-500]]), ("tree.n", ["n", 4, "(1000,2)u1", [1]]),
    ],
)  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused(path: str, value: Any) -> None:
    manifest = good()
    change(path, value)(manifest)
    refuse(manifest)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 1_000_000, b'{"a":' * 100_000, b"9" * 100_000],
)
def test_what_is_no_manifest_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedState):
        parse(raw)


def test_a_deep_skeleton_is_refused() -> None:
    manifest = good()
    tree: Any = manifest["tree"]
    for _ in range(400):
        tree = ["l", tree]
    manifest["tree"] = tree
    refuse(manifest)


def test_too_many_tensors_or_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.manifest.MAX_TENSORS", 3)
    refuse(good())
    monkeypatch.undo()
    monkeypatch.setattr("transport.manifest.MAX_MANIFEST", 100)
    refuse(good())


@pytest.mark.parametrize(
    "node",
    [["d", 1], ["d", [1]], ["d", [["l"], 1]], ["dd", "exec"], ["i", "zz"], ["f", "00"], ["b", "?"],
     ["dtype", "x"],
     ["device", "../x"], ["ns", "O", "00"], ["ns", "<f8", "00"], ["what"], [], [5], ["u", "ff"],
     ["range", 1, 2, 0],
     ["size", -1, "x"], ["s", ["l"]], ["q", "x"]],
)  # fmt: skip
def test_a_malformed_skeleton_is_an_error_of_its_own_kind(node: Any) -> None:
    manifest = good()
    manifest["tree"]["x"] = node
    with pytest.raises(MalformedState):
        Plan(parse(json.dumps(manifest).encode()), {}).result()
