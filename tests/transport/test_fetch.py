"""A fetch between real transports on loopback gives the very state of the sources, in place."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from transport import (
    HTTPTransport,
    Progress,
    SourceError,
    StateMismatch,
    TokenRefused,
    TransportAborted,
    TransportError,
    TransportTimeout,
    VersionMismatch,
)
from transport.crew import MAX_IDLE

Make = Callable[..., HTTPTransport]
Same = Callable[[Any, Any], None]
Wait = Callable[..., None]


def training_state(seed: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 32)).square().sum().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}
    return model, optimizer, state


def test_a_fresh_trainer_takes_over_the_whole_state(make_transport: Make, assert_same: Same) -> None:
    _, _, state = training_state(1, steps=3)
    model, optimizer, into = training_state(2, steps=0)
    source, joiner = make_transport(), make_transport()
    source.publish("1-3", state)
    result: Any = joiner.fetch([source.address], "1-3", into, deadline_s=10)
    assert_same(result, state)
    for name, tensor in into["model"].items():
        assert result["model"][name] is tensor, "received in place"
    assert torch.equal(model.state_dict()["0.weight"], state["model"]["0.weight"])
    optimizer.load_state_dict(result["optimizer"])


def test_everything_present_is_received_without_a_second_copy(make_transport: Make) -> None:
    _, _, state = training_state(1, steps=2)
    _, _, into = training_state(2, steps=2)
    source, joiner = make_transport(chunk_bytes=4096), make_transport()
    source.publish("v", state)
    pointers = {k: v.data_ptr() for k, v in into["model"].items()}
    result: Any = joiner.fetch([source.address], "v", into, deadline_s=10)
    for index, slots in state["optimizer"]["state"].items():
        for name, tensor in slots.items():
            assert result["optimizer"]["state"][index][name] is into["optimizer"]["state"][index][name]
            assert torch.equal(into["optimizer"]["state"][index][name], tensor)
    assert {k: v.data_ptr() for k, v in result["model"].items()} == pointers


@pytest.mark.parametrize("num_sources", [1, 3])
@pytest.mark.parametrize("chunk_bytes", [1 << 12, 1 << 16, 8 << 20])
def test_large_states_are_striped_over_all_sources(
    make_transport: Make, assert_same: Same, num_sources: int, chunk_bytes: int
) -> None:
    state = {f"p{i}": torch.randn(1000 + 517 * i) for i in range(40)}
    state["big"] = torch.randint(0, 256, (5_000_001,), dtype=torch.uint8)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    sources = [make_transport(chunk_bytes=chunk_bytes) for _ in range(num_sources)]
    for source in sources:
        source.publish("v", state)
    seen: list[Progress] = []
    result = make_transport(streams=6).fetch(
        [s.address for s in sources], "v", into, deadline_s=30, progress=seen.append
    )
    assert_same(result, state)
    assert seen[-1].bytes_done == seen[-1].bytes_total == sum(t.nbytes for t in state.values())
    assert seen[-1].num_sources == num_sources


def test_a_state_larger_than_what_is_hashed_at_once_is_verified_all_the_same(make_transport: Make) -> None:
    state = {"w": torch.randint(0, 256, (40 << 20,), dtype=torch.uint8)}
    into = {"w": torch.zeros_like(state["w"])}
    sources = [make_transport(chunk_bytes=1 << 20) for _ in range(2)]
    for source in sources:
        source.publish("v", state)
    make_transport().fetch([s.address for s in sources], "v", into, deadline_s=30)
    assert torch.equal(into["w"], state["w"])


def test_other_strides_and_aliases_here_than_there_get_the_same_values(make_transport: Make) -> None:
    tied = torch.randn(6, 4)
    state = {
        "t": torch.randn(5, 3).t(),
        "c": torch.randn(3, 5),
        "a": tied,
        "b": tied,
        "h": torch.arange(10)[::2],
    }
    into = {
        "t": torch.zeros(3, 5),
        "c": torch.zeros(5, 3).t(),
        "a": torch.zeros(6, 4),
        "b": torch.zeros(6, 4),
        "h": torch.zeros(15, dtype=torch.int64)[::3],
    }
    source = make_transport()
    source.publish("v", state)
    result: Any = make_transport().fetch([source.address], "v", into, deadline_s=10)
    for name, tensor in state.items():
        assert result[name] is into[name]
        assert torch.equal(into[name], tensor), name


def test_a_flat_buffer_here_is_filled_through_its_views(make_transport: Make) -> None:
    state = {"a": torch.randn(4, 5), "b": torch.randn(7)}
    flat = torch.zeros(40)
    into = {"a": flat[3:23].view(4, 5), "b": flat[30:37]}
    source = make_transport()
    source.publish("v", state)
    make_transport().fetch([source.address], "v", into, deadline_s=10)
    assert torch.equal(into["a"], state["a"])
    assert torch.equal(flat[30:37], state["b"])
    assert not flat[:3].any()
    assert not flat[23:30].any()
    assert not flat[37:].any()


@pytest.mark.parametrize("state", [{}, [], None, 7, {"e": torch.empty(0)}, {"n": [1, {"x": "y"}]}])
def test_states_without_bytes_arrive(make_transport: Make, assert_same: Same, state: Any) -> None:
    source = make_transport()
    source.publish("v", state)
    assert_same(make_transport().fetch([source.address], "v", None, deadline_s=10), state)


@pytest.mark.parametrize(
    ("into", "message"),
    [
        (
            {"model": {"a": torch.zeros(3), "b": torch.zeros(2, 3)}},
            r"model/b: .*float32\[2, 2\], here is float32\[2, 3\]",
        ),
        (
            {"model": {"a": torch.zeros(3).double(), "b": torch.zeros(2, 2)}},
            r"model/a: .*float32\[3\], here is float64\[3\]",
        ),
        (
            {"model": {"a": torch.zeros(3), "b": torch.zeros(2, 2), "c": torch.zeros(1)}},
            "model/c: .*not at the source",
        ),
        ({"model": {"a": [torch.zeros(3)], "b": torch.zeros(2, 2)}}, "model/a: the source has a tensor"),
        ({"model": {"a": torch.zeros(3), "b": torch.zeros(2, 2)}, "n": torch.ones(1)}, "n: here is a tensor"),
    ],
)
def test_another_model_is_refused_before_anything_is_written(
    make_transport: Make, into: dict[str, Any], message: str
) -> None:
    source, joiner = make_transport(), make_transport()
    source.publish("v", {"model": {"a": torch.ones(3), "b": torch.ones(2, 2)}, "n": 1})
    with pytest.raises(StateMismatch, match=message):
        joiner.fetch([source.address], "v", into, deadline_s=10)
    assert not any(t.any() for t in into["model"].values() if isinstance(t, torch.Tensor))
    joiner.fetch([source.address], "v", {}, deadline_s=10)


def test_tensors_tied_here_but_not_at_the_source_are_refused(make_transport: Make) -> None:
    source = make_transport()
    source.publish("v", {"a": torch.ones(3), "b": torch.zeros(3)})
    tied = torch.zeros(3)
    with pytest.raises(StateMismatch, match="b: it shares memory with a here"):
        make_transport().fetch([source.address], "v", {"a": tied, "b": tied}, deadline_s=10)


def test_a_wrong_token_is_named_and_nothing_is_given(make_transport: Make) -> None:
    source, joiner = make_transport(), make_transport(token="other")
    source.publish("v", {"a": torch.ones(3)})
    with pytest.raises(TokenRefused, match=source.address) as caught:
        joiner.fetch([source.address], "v", {}, deadline_s=10)
    assert "refused the token" in caught.value.sources[source.address]


def test_a_wrong_version_is_an_error_at_once(make_transport: Make) -> None:
    source, joiner = make_transport(), make_transport()
    source.publish("7-100", {"a": torch.ones(3)})
    begun = time.monotonic()
    with pytest.raises(VersionMismatch, match="serves version '7-100'"):
        joiner.fetch([source.address], "8-101", {}, deadline_s=30)
    assert time.monotonic() - begun < 5


def test_a_source_that_publishes_late_is_waited_for(make_transport: Make) -> None:
    """Joiner and sources learn of an epoch at the same time; who is ready first must not matter."""
    source, joiner = make_transport(), make_transport()
    source.publish("old", {"a": torch.zeros(3)})
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(joiner.fetch([source.address], "v/1 ü", {}, deadline_s=20))
    )
    thread.start()
    source.withdraw()
    source.publish("v/1 ü", {"a": torch.ones(3)})
    thread.join(20)
    assert torch.equal(found[0]["a"], torch.ones(3))


def test_one_source_of_another_version_does_not_spoil_the_fetch(make_transport: Make) -> None:
    good, other, odd, joiner = (make_transport(chunk_bytes=1 << 16) for _ in range(4))
    state = {"a": torch.randn(200_000)}
    good.publish("v", state)
    other.publish("w", state)
    odd.publish("v", {"a": torch.randn(200_000), "b": torch.randn(3)})
    into = {"a": torch.zeros(200_000)}
    joiner.fetch([good.address, other.address, odd.address], "v", into, deadline_s=20)
    assert torch.equal(into["a"], state["a"])


def test_the_deadline_bounds_the_wait_and_names_what_each_source_did(make_transport: Make) -> None:
    source, joiner = make_transport(), make_transport()
    begun = time.monotonic()
    with pytest.raises(TransportTimeout, match=f"{source.address}: .*published nothing|was asked"):
        joiner.fetch([source.address], "v", {}, deadline_s=0.5)
    assert time.monotonic() - begun < 2


def test_a_source_that_is_not_there_is_an_error_at_once(make_transport: Make) -> None:
    gone = make_transport()
    gone.close()
    begun = time.monotonic()
    with pytest.raises(SourceError, match="Connection refused"):
        make_transport().fetch([gone.address], "v", {}, deadline_s=30)
    assert time.monotonic() - begun < 5


def test_abort_ends_a_fetch_at_once_and_the_transport_stays_usable(
    make_transport: Make, wait_until: Wait
) -> None:
    source, joiner = make_transport(), make_transport()
    caught: list[BaseException] = []

    def fetch() -> None:
        try:
            joiner.fetch([source.address], "v", {}, deadline_s=60)
        except TransportError as error:
            caught.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    wait_until(lambda: bool(source._server._connections), "the joiner has connected")
    begun = time.monotonic()
    joiner.abort()
    thread.join(10)
    assert time.monotonic() - begun < 1
    assert isinstance(caught[0], TransportAborted)
    source.publish("v", {"a": torch.ones(2)})
    result: Any = joiner.fetch([source.address], "v", {}, deadline_s=10)
    assert result["a"].sum() == 2


def test_an_error_in_the_progress_callback_ends_the_fetch(make_transport: Make) -> None:
    source = make_transport()
    source.publish("v", {"a": torch.ones(2)})

    def progress(report: Progress) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        make_transport().fetch([source.address], "v", {}, deadline_s=10, progress=progress)


def test_live_memory_is_served_and_not_after_withdraw(make_transport: Make) -> None:
    source, joiner = make_transport(), make_transport()
    live = torch.zeros(1000)
    source.publish("v", {"a": live})
    live.fill_(3)  # no copy was made
    result: Any = joiner.fetch([source.address], "v", {}, deadline_s=10)
    assert torch.equal(result["a"], live)
    source.withdraw()
    source.withdraw()
    with pytest.raises(TransportTimeout):
        joiner.fetch([source.address], "v", {}, deadline_s=0.3)


def test_publishing_takes_no_longer_for_a_large_state(make_transport: Make) -> None:
    source = make_transport()
    small, large = {"a": torch.zeros(1000)}, {"a": torch.zeros(64 << 20)}
    times = []
    for state in (small, large):
        best = 1.0
        for _ in range(5):
            begun = time.perf_counter()
            source.publish("v", state)
            best = min(best, time.perf_counter() - begun)
            source.withdraw()
        times.append(best)
    assert max(times) < 0.02


def test_nothing_leaks_over_many_cycles(make_transport: Make, wait_until: Wait) -> None:
    sources, joiner = [make_transport() for _ in range(2)], make_transport()
    state, into = {"a": torch.randn(1000)}, {"a": torch.zeros(1000)}

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def cycle(i: int) -> None:
        for source in sources:
            source.publish(f"v{i}", state)
        with contextlib.suppress(TransportError):
            joiner.fetch(
                [s.address for s in sources],
                f"v{i}" if i % 10 else "no",
                into,
                deadline_s=0.02 if i % 10 == 0 else 10,
            )
        for source in sources:
            source.withdraw()

    cycle(1)
    threads, open_before = threading.active_count(), descriptors()
    for i in range(1, 301):
        cycle(i)
    idle = MAX_IDLE * (len(sources) + 1)
    wait_until(lambda: threading.active_count() <= threads + idle, "the threads have ended")
    wait_until(lambda: descriptors() <= open_before, "the descriptors are closed")


def test_many_joiners_are_served_at_once(make_transport: Make) -> None:
    state = {"w": torch.randint(0, 256, (6 << 20,), dtype=torch.uint8)}
    sources = [make_transport(chunk_bytes=1 << 18) for _ in range(2)]
    for source in sources:
        source.publish("v", state)
    intos = [{"w": torch.zeros_like(state["w"])} for _ in range(5)]
    joiner = make_transport()
    addresses = [source.address for source in sources]

    def fetch(into: dict[str, torch.Tensor]) -> None:
        joiner.fetch(addresses, "v", into, deadline_s=30)

    threads = [threading.Thread(target=fetch, args=(into,)) for into in intos]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(torch.equal(into["w"], state["w"]) for into in intos)


def test_a_forked_child_does_not_keep_a_dead_source_reachable(make_transport: Make) -> None:
    """Data loaders fork; joiners must see at once that the trainer itself is gone."""
    source = make_transport()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent closes its end
        os._exit(0)
    try:
        source.close()
        begun = time.monotonic()
        with pytest.raises(SourceError, match="refused"):
            make_transport().fetch([source.address], "v", {}, deadline_s=20)
        assert time.monotonic() - begun < 5
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)


def test_a_closed_transport_says_so(make_transport: Make) -> None:
    with make_transport() as transport:
        pass
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        transport.publish("v", {})
    with pytest.raises(TransportError, match="closed"):
        transport.fetch(["http://127.0.0.1:1"], "v", {}, deadline_s=1)


@pytest.mark.parametrize(
    "settings", [{"token": ""}, {"token": "a\n"}, {"bind": "0.0.0.0"}, {"streams": 0}, {"chunk_bytes": 1}]
)
def test_senseless_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"token|advertise|streams|chunk_bytes"):
        HTTPTransport(**{"token": "t", **settings})


def test_an_abort_may_be_faster_than_the_fetch_that_it_is_for(make_transport: Make) -> None:
    """Another thread decides that the version is of no use, while this one is about to ask for it."""
    source, joiner = make_transport(), make_transport()
    joiner.abort("v1")
    with pytest.raises(TransportAborted, match="v1"):
        joiner.fetch([source.address], "v1", None, deadline_s=60)
    source.publish("v2", {"a": 1})
    assert joiner.fetch([source.address], "v2", None, deadline_s=60) == {"a": 1}


def test_the_address_is_the_one_that_others_can_reach(make_transport: Make) -> None:
    assert make_transport(bind="0.0.0.0", advertise="localhost").address.startswith("http://localhost:")
    assert make_transport(advertise="example.org:80").address == "http://example.org:80"
    with contextlib.suppress(OSError):
        transport = make_transport(bind="::1")
        transport.publish("v", {"a": 1})
        assert make_transport().fetch([transport.address], "v", None, deadline_s=5) == {"a": 1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_travel_through_pinned_memory(make_transport: Make, assert_same: Same) -> None:
    state = {
        "w": torch.randn(3_000_000, device="cuda"),
        "s": torch.tensor(3.0),
        "t": torch.randn(5, 4, device="cuda").t(),
    }
    source = make_transport(chunk_bytes=1 << 20)
    source.publish("v", state)
    into: dict[str, Any] = {"w": torch.zeros(3_000_000, device="cuda"), "t": torch.zeros(4, 5, device="cuda")}
    result: Any = make_transport().fetch([source.address], "v", into, deadline_s=30)
    assert_same(result, state)
    assert result["w"] is into["w"]
    assert result["s"].device.type == "cpu"
