"""What a fault cost, and what must stay flat."""

from __future__ import annotations

import os
import threading

import msgspec

from ftkit.chaos.checks import Pause
from ftkit.chaos.cost import longest_pauses
from ftkit.chaos.gauges import Gauges, Growth, leaks, read


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
    assert leaks([growth], [1000, 2000]) == []


def test_what_does_not_stay_flat_is_named() -> None:
    small = Growth(name="trainer-0", pid=7, seconds=60.0, descriptors=2, threads=1, rss_kib=500)
    assert leaks([small], []) == []
    [fds] = leaks([small, msgspec.structs.replace(small, descriptors=21)], [0, 8_000_000])
    assert fds == "trainer-0 (pid 7) has grown by 21 descriptors in 60 s"
    assert len(leaks([msgspec.structs.replace(small, threads=11, rss_kib=10**6)], [0, 9_000_000])) == 3


def test_what_is_gone_has_no_reading() -> None:
    assert read(2**22 + 1, 0.0) is None
