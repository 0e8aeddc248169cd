"""`python -m tcpx.bench` over the backend: one piece and lists, written and read, and what arrives is compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "tcpx-python/python/tcpx/bench.py"


def test_the_backend_is_measured_with_pieces_and_lists(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(BENCH), "--who", "nixl-tcpx,nixl-tcpx-read", "--sizes", "1MiB", "--lists", "1024x4KiB"]
    command += ["--rounds", "1", "--span", "0.01", "--program", "/bin/true", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    names = {row["name"] for row in json.loads(result.read_text())["rows"]}
    for who in ("nixl-tcpx", "nixl-tcpx-read"):
        for title in ("1 MiB, 1 in flight", "1 MiB, 8 in flight", "1024 pieces of 4 KiB"):
            assert f"{title}: {who}" in names, done.stderr
    assert "4 KiB, half a round trip: nixl-tcpx, p50" in names
