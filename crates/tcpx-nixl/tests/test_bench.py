"""`python -m tcpx.bench nixl`: it measures every workload, and compares what arrives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "tcpx-python/python/tcpx/bench/_nixl.py"
CALLERS = ("4 KiB", "256 MiB", "Llama-8B", "70B", "MLA", "vLLM pull", "vLLM push", "SGLang", "LMCache")


def test_every_workload_is_measured(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(BENCH), "--quick", "--rounds", "1", "--peers", "tcpx"]
    done = subprocess.run(
        [*command, "--json", str(result)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads(result.read_text())["tcpx"]
    for caller in CALLERS:
        assert any(case.startswith(caller) for case in figures), f"{caller} is missing in {list(figures)}"
    assert all(seconds > 0 for seconds, _ in figures.values())
    assert "| case | tcpx |" in done.stdout
