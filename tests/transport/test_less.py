"""Only bytes that are referenced travel, each once, and those that are here already do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.transport.test_pg import make_groups
from transport import DistributedTransport, HTTPTransport, Progress, SourceError

Make = Callable[..., HTTPTransport]
Same = Callable[[Any, Any], None]
KB, MB = 1 << 10, 1 << 20


def forward(proxy: Any, before: int, data: bytes) -> bytes:
    return data


VIEWS: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "rows": lambda flat: list(flat.view(1000, 1000)),
    "overlapping": lambda flat: [flat[i : i + 900_000] for i in range(0, 100_000, 100)],
    "columns": lambda flat: list(flat.view(1000, 1000).t()),
}


@pytest.mark.parametrize("cut", VIEWS.values(), ids=VIEWS)
def test_a_thousand_views_of_4_mb_cost_4_mb_over_http(
    make_transport: Make, make_proxy: Callable[..., Any], cut: Callable[[torch.Tensor], list[torch.Tensor]]
) -> None:
    """All that the source sends is counted, the manifest too."""
    views = cut(torch.randn(1_000_000))
    assert len(views) == 1000
    source = make_transport()
    source.publish("v", views)
    proxy = make_proxy(source.address, forward)
    got: Any = make_transport().fetch([proxy.address], "v", None, deadline_s=30)
    assert proxy.bytes_sent <= 4_200_000
    assert all(torch.equal(got[i], views[i]) for i in range(0, 1000, 111))


def test_a_thousand_views_of_4_mb_cost_4_mb_over_a_group(
    make_transport: Make, make_proxy: Callable[..., Any]
) -> None:
    views = VIEWS["overlapping"](torch.randn(1_000_000))
    groups = make_groups(2)
    source, joiner = (DistributedTransport(make_transport()) for _ in range(2))
    for member, group in zip((source, joiner), groups, strict=True):
        member.configure(group, "epoch 1")  # type: ignore[arg-type]
    source.publish("v", views)
    proxy = make_proxy(source.address, forward)
    got: Any = joiner.fetch([proxy.address], "v", None, deadline_s=30)
    assert groups[0].bytes_sent >= 3_500_000
    assert groups[0].bytes_sent + proxy.bytes_sent <= 4_200_000
    assert all(torch.equal(got[i], views[i]) for i in range(0, 1000, 111))


def new_state(count: int = 8) -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.randint(0, 256, (MB,), dtype=torch.uint8) for i in range(count)}


def with_changes(state: dict[str, torch.Tensor], *changed: int) -> dict[str, torch.Tensor]:
    """Return a copy that differs in every byte of some tensors."""
    return {name: tensor + (int(name[1:]) in changed) for name, tensor in state.items()}


@pytest.mark.parametrize("count", [8, 40], ids=["small", "sampled"])
def test_only_chunks_that_differ_are_fetched(
    make_transport: Make, make_proxy: Callable[..., Any], count: int
) -> None:
    state = new_state(count)
    into = with_changes(state, 1, 6)
    source = make_transport(chunk_bytes=256 * KB)
    source.publish("v", state)
    proxy = make_proxy(source.address, forward)
    seen: list[Progress] = []
    make_transport().fetch([proxy.address], "v", into, deadline_s=30, reuse=True, progress=seen.append)
    assert all(torch.equal(into[name], state[name]) for name in state)
    assert 2 * MB <= proxy.bytes_sent < 2 * MB + 100 * KB
    assert seen[-1].bytes_done == count * MB


def test_a_state_that_differs_everywhere_is_fetched_whole(make_transport: Make) -> None:
    state = new_state(40)
    into = with_changes(state, *range(40))
    source = make_transport(chunk_bytes=256 * KB)
    source.publish("v", state)
    make_transport().fetch([source.address], "v", into, deadline_s=30, reuse=True)
    assert all(torch.equal(into[name], state[name]) for name in state)


def test_the_same_bytes_under_other_strides_or_for_an_alias_are_not_mistaken(
    make_transport: Make, assert_same: Same
) -> None:
    """What lies in memory as at the source counts only if it is all that has to be right."""
    square = torch.randn(300, 300)
    state = {"a": square, "b": square.view(-1), "c": torch.randn(300, 300)}
    into = {
        "a": square.clone(),
        "b": torch.zeros(90_000),
        "c": state["c"].clone().t().contiguous().t(),
    }
    into["c"].zero_()
    source = make_transport(chunk_bytes=64 * KB)
    source.publish("v", state)
    make_transport().fetch([source.address], "v", into, deadline_s=30, reuse=True)
    for name, tensor in state.items():
        assert torch.equal(into[name], tensor), name


def test_a_fetch_that_failed_half_way_is_taken_up_again(
    make_transport: Make, make_proxy: Callable[..., Any]
) -> None:
    state = new_state(40)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    source = make_transport(chunk_bytes=256 * KB)
    source.publish("v", state)

    def until_half(proxy: Any, before: int, data: bytes) -> bytes | None:
        return data if proxy.bytes_sent < 20 * MB else None

    broken, whole = make_proxy(source.address, until_half), make_proxy(source.address, forward)
    with pytest.raises(SourceError):
        make_transport().fetch([broken.address], "v", into, deadline_s=30)
    make_transport().fetch([whole.address], "v", into, deadline_s=30, reuse=True)
    assert all(torch.equal(into[name], state[name]) for name in state)
    assert broken.bytes_sent + whole.bytes_sent < 44 * MB


def test_a_source_that_vanishes_while_chunks_are_compared_is_an_error_at_once(
    make_transport: Make, make_proxy: Callable[..., Any]
) -> None:
    state = new_state(40)
    source = make_transport(chunk_bytes=4 * KB)
    source.publish("v", state)

    def until_some(proxy: Any, before: int, data: bytes) -> bytes | None:
        return data if proxy.bytes_sent < 60_000 else None  # of 160 kB of checksums

    proxy = make_proxy(source.address, until_some)
    into = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(SourceError):
        make_transport(stall_s=0.3).fetch([proxy.address], "v", into, deadline_s=30, reuse=True)


def test_buckets_that_are_here_are_not_sent_over_the_group(make_transport: Make) -> None:
    state = new_state()
    into = with_changes(state, 1, 6)
    groups = make_groups(3)
    members = [DistributedTransport(make_transport(chunk_bytes=256 * KB)) for _ in range(3)]
    for member, group in zip(members, groups, strict=True):
        member.configure(group, "epoch 1")  # type: ignore[arg-type]
        if member is not members[-1]:
            member.publish("v", state)
    members[-1].fetch([m.address for m in members[:-1]], "v", into, deadline_s=30, reuse=True)
    assert all(torch.equal(into[name], state[name]) for name in state)
    assert sum(group.bytes_sent for group in groups) == 2 * MB
