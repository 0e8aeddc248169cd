"""`python -m tcpx.bench` over the backend: messages and lists, written and read, and what arrives is compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "tcpx-python/python/tcpx/bench.py"


def case(mode: str, op: str, piece: int = 0, depth: int = 1) -> str:
    run = {"mode": mode, "op": op, "bytes": 4 << 20, "depth": depth, "piece": piece}
    return json.dumps({"run": run, "ms": 10})


def test_the_backend_is_measured_with_pieces_and_lists() -> None:
    cases = [case("latency", "send"), case("one", "send", 0, 8)]
    cases += [case("one", op, piece) for op in ("put", "get") for piece in (0, 4096)]
    command = [sys.executable, str(BENCH), "serve", "nixl-tcpx"]
    lines = "\n".join(cases) + "\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, timeout=300)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases), done.stderr
    for answer in answers:
        assert all(figure > 0 for figure in answer["figures"].values()), answer
