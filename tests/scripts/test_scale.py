"""The measurement of large jobs, on a small one: it must measure what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "scale.py"
NUM = 10


def test_a_small_job_is_measured() -> None:
    words = ["--members", str(NUM), "--steady", "2", "--deaths", "1", "--joiners", "3", "--json"]
    ran = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)
    assert ran.stdout, ran.stderr
    [row] = json.loads(ran.stdout)["rows"]
    assert (row["members"], row["joiners"]) == (NUM, 3)
    assert row["death_p50_s"] > 0
    # Each survivor asks once for the next epoch, one publishes it, the dead one's keeper proves its death.
    assert NUM <= row["death_requests"] < 5 * NUM
    assert row["death_bytes"] > 60 * NUM * NUM, "each is told of each"
    assert row["join_epochs"] >= 1
    assert row["other_requests_per_s"] == 0, "while nothing changes, nothing is asked"
