"""`ftkit bench steady`: what a step costs more than with plain DDP, while nothing fails.

Every replica runs both in one process, in turn, block by block: what else the machine does falls on both.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from ftkit.bench.processes import Row, Worker, all_ended_well, ending, median, spread, wait_for
from ftkit.keeper.embedded import Embedded, free_ports


def measure(*, groups: int, model: str, steps: int, pairs: int) -> Row:
    """Run the benchmark; times in milliseconds, medians over `pairs` pairs of blocks and all replicas."""
    with tempfile.TemporaryDirectory(prefix="ftkit-bench-") as folder, Embedded() as etcd:
        url, port = etcd.endpoints[0], free_ports(1)[0]
        settings = {"etcd": url, "job": "steady", "min_replicas": groups, "stats_interval": 1e6}
        fixed = ["--groups", groups, "--steps", steps, "--pairs", pairs, "--port", port]
        fixed += ["--model", model, "--etcd-url", url]
        workers: list[Worker] = []
        with ending(workers):
            for rank in range(groups):
                arguments = [str(a) for a in ("--rank", rank, *fixed)]
                own = {**settings, "replica_id": f"trainer-{rank}"}
                log = Path(folder) / f"{rank}.jsonl"
                workers.append(Worker("ftkit.bench.steady_worker", arguments, log, own))
            limit = 60 + pairs * steps * groups * (0.1 if model == "medium" else 0.02)
            wait_for(lambda: all_ended_well(workers), limit, "the workers to finish")
            rows = [w.rows() for w in workers]
    return _summary(rows, groups, model)


def _summary(rows: list[list[Row]], groups: int, model: str) -> Row:
    pairs = [
        (float(str(r["ddp_p50"])), float(str(r["step_p50"]))) for rs in rows for r in rs if "ddp_p50" in r
    ]
    ddp, kit = [d for d, _ in pairs], [k for _, k in pairs]
    extra, ratio = [k - d for d, k in pairs], [k / d for d, k in pairs]
    counted = next(r for r in rows[0] if "requests" in r)
    requests = counted["requests"]
    assert isinstance(requests, dict), "as the worker wrote it"
    return {
        "bench": "steady",
        "groups": groups,
        "model": model,
        "ddp_p50_ms": median(ddp),
        "step_p50_ms": median(kit),
        "overhead_p50_ms": median(extra),
        "overhead_spread_ms": spread(extra),
        "ratio_p50": median(ratio),
        "ratio_spread": spread(ratio),
        "steps": counted["steps"],
        "etcd_requests": sum(requests.values()),
        "etcd_requests_by_method": requests,
    }
