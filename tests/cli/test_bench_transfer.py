"""`ftkit bench transfer` on a small state: the figures are there, and are those of one run."""

from __future__ import annotations

import json

import pytest

from ftkit.bench import transfer
from ftkit.cli.main import main
from ftkit.errors import FtkitError


def test_each_method_has_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--json", "--sizes", "8", "--reps", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = {row["method"]: row for row in told["results"]}
    assert set(found) >= {*transfer.OURS}
    for row in told["results"]:
        assert row["size_mib"] == 8
        assert row["gb_s"] > 0
        assert row["ratio_to_raw1"] > 0
        assert row["gb_s_min"] <= row["gb_s"] <= row["gb_s_max"]
        assert {"extra_memory_source", "extra_memory_receiver", "source_cpu_ratio"} <= set(row)
    assert found["raw1"]["ratio_to_raw1"] == 1.0
    views, over_gloo, joiners = told["sent"]
    assert views["sent_bytes"] <= 4_200_000
    assert over_gloo["sent_bytes"] <= 4_200_000
    assert 1.0 <= joiners["sent_sizes"] <= 1.3


def test_a_size_that_does_not_fit_is_skipped_with_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A benchmark that is killed for memory tells nothing."""
    monkeypatch.setattr(transfer, "available_memory", lambda: 100 << 20)
    assert main(["bench", "transfer", "--sizes", "8"]) == 0
    assert "8 MiB skipped" in capsys.readouterr().out


def test_an_error_in_a_side_is_told() -> None:
    with transfer.Side(1, "source") as side, pytest.raises(FtkitError, match="KeyError"):
        side.ask("open", method="carrier pigeon")


@pytest.mark.parametrize("words", [["--sizes", "big"], ["--sizes", "0"]])
def test_sizes_must_be_numbers(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "transfer", *words])
