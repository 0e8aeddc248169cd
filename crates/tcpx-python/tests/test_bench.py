"""The bench of Python: that it measures what it says, whoever is installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tcpx
from tcpx import bench

SHORT = [sys.executable, "-m", "tcpx.bench", "--rounds", "2", "--span", "0.01"]
needs_program = pytest.mark.skipif(
    not tcpx.program_path().exists(), reason="the program comes with an installed package alone"
)


@needs_program
def test_every_contender_of_ours_is_measured_beside_the_program(tmp_path):
    path = tmp_path / "report.json"
    command = [*SHORT, "--sizes", "64KiB,1MiB", "--in-flight", "1,4", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    for who in (*bench.OURS, bench.PROGRAM):
        for title in ("64 KiB, 1 in flight", "64 KiB, 4 in flight", "1 MiB, 1 in flight", "1 MiB, 4 in flight"):
            assert rows[f"{title}: {who}"]["runs"] == 2
            assert f"{title}: {who} " in done.stdout
    assert rows["4 KiB, half a round trip: tcpx, p50"]["median"] > 0


@needs_program
@pytest.mark.slow
@pytest.mark.parametrize("peer", bench.PEERS)
def test_a_peer_is_measured_or_left_out_with_the_reason(peer):
    command = [*SHORT, "--sizes", "64KiB", "--in-flight", "2", "--lists", "16x4KiB", "--who", f"tcpx,{peer}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if f"{peer} is left out: " in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert f"64 KiB, 2 in flight: {peer} " in done.stdout


def test_a_contender_that_nobody_knows_is_refused():
    done = subprocess.run([*SHORT, "--who", "nobody"], capture_output=True, text=True)
    assert done.returncode == 2 and "no contender 'nobody'" in done.stderr
