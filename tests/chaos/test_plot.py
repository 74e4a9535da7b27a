"""The pace of a run, drawn."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from ftkit.chaos.faults import Fault
from ftkit.chaos.oracle import judge
from ftkit.chaos.plot import as_svg, as_text, paces
from ftkit.chaos.result import Result, Strike, report
from tests.chaos.job import healthy, log_of


def result() -> Result:
    """Ten seconds at two steps a second, but for two seconds of nothing after a kill in second 4."""
    fault = Fault(at=4.0, kind="kill", victim=1)
    return Result(
        ok=True,
        seed=7,
        trouble="",
        goodput=0.8,
        steps=16,
        fault_free_steps_per_s=2.0,
        seconds=10.0,
        num_skipped=0,
        begun=100.0,
        strikes=[Strike(fault=fault, at=104.0, text="kill <1>", longest_pause_s=2.0)],
        commits=[i / 2 for i in range(20) if not 4 <= i / 2 < 6],
        growth=[],
        etcd_bytes=[20480, 40960],
        verdict=judge(log_of(healthy())),
        folder="/run",
    )


def test_the_pace_is_what_was_committed_in_each_part() -> None:
    assert paces(result().commits, 10.0, 5) == [2.0, 2.0, 0.0, 2.0, 2.0]
    assert paces([], 0.0, 5) == []


def test_as_text_a_pause_is_a_gap_above_its_fault() -> None:
    _, bars, marks = as_text(result()).splitlines()
    assert bars == "  ████  ████"
    assert marks.rstrip() == "      ^"


def test_the_picture_is_xml_with_every_fault_in_it() -> None:
    root = ElementTree.fromstring(as_svg(result()))
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["kill <1>: 2.00 s"]
    empty = result()
    empty.commits, empty.strikes, empty.seconds, empty.fault_free_steps_per_s = [], [], 0.0, 0.0
    ElementTree.fromstring(as_svg(empty))


def test_the_report_tells_cost_growth_and_goodput() -> None:
    text = report(result())
    assert "2.00 s  kill <1>" in text
    assert "database of etcd: 20 KiB and then 40 KiB" in text
    assert "goodput 80.0 %: 16 steps in 10 s, 2.0 a second before" in text
