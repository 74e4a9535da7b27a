"""What a fault cost, and what must stay flat."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ftkit.chaos.checks import Pause
from ftkit.chaos.cost import longest_pauses
from ftkit.chaos.gauges import Gauges, folder_bytes, read


def pause(replica: str, since: float, until: float) -> Pause:
    return Pause(seconds=until - since, replica=replica, since=since, until=until, where="")


def test_a_pause_belongs_to_the_fault_that_began_it() -> None:
    strikes = [(1.0, "a"), (5.0, "b")]
    pauses = [
        pause("b", 0.0, 0.5),  # before all faults
        pause("b", 0.9, 3.0),
        pause("a", 0.9, 9.0),  # the victim's own
        pause("c", 4.0, 8.0),  # the second fault struck in the middle of it
        pause("b", 5.5, 9.5),  # the victim's own again
        pause("c", 8.0, 8.25),
    ]
    assert longest_pauses(pauses, strikes) == [3.0 - 0.9, 4.0]
    assert longest_pauses([pause("c", 0.5, 6.0)], strikes) == [5.5, 0.0]
    assert longest_pauses(pauses, []) == []


def test_a_leak_of_descriptors_and_threads_is_seen() -> None:
    gauges = Gauges(settle_s=0.0)
    pid = os.getpid()
    gauges.look("me", pid, 0.0)
    gauges.look("nobody", 2**22 + 1, 0.0)
    reader, writer = os.pipe()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        gauges.look("me", pid, 100.0)
    finally:
        stop.set()
        thread.join()
        os.close(reader)
        os.close(writer)
    [growth] = gauges.growth()
    assert (growth.name, growth.seconds) == ("me", 100.0)
    assert growth.descriptors == 2
    assert growth.threads == 1
    assert gauges.growth(at_least_s=200.0) == []


def test_what_is_gone_has_no_reading(tmp_path: Path) -> None:
    assert read(2**22 + 1, 0.0) is None
    assert folder_bytes(tmp_path / "nowhere") == 0
    (tmp_path / "x").write_bytes(b"x" * 10_000)
    assert folder_bytes(tmp_path) >= 8192
