"""The bench of Python: that it measures what it says, whoever is installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tcpx
from tcpx import bench

BENCH = [sys.executable, "-m", "tcpx.bench"]
SHORT = ["--rounds", "2", "--span", "10ms", "--sizes", "64KiB", "--in-flight", "4", "--json"]
needs_program = pytest.mark.skipif(
    not tcpx.program_path().exists(), reason="the program comes with an installed package alone"
)


def measured(*flags: str) -> tuple[set[str], str]:
    done = subprocess.run([*BENCH, *flags, *SHORT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    return {row["name"] for row in report["rows"] if row["runs"] == 2}, " ".join(report["notes"])


@needs_program
def test_every_contender_of_ours_is_measured_beside_the_program():
    names, _ = measured("--who", ",".join(bench.OURS), "--modes", "latency,one")
    for who in (*bench.OURS, "tcpx"):
        assert f"64 KiB, 4 in flight: {who}" in names
    assert "64 KiB, half a round trip: python, p50" in names
    names, _ = measured("--who", "python", "--modes", "one", "--op", "put,get")
    assert {"64 KiB, 4 in flight: python, put", "64 KiB, 4 in flight: python, get"} <= names


@needs_program
@pytest.mark.slow
@pytest.mark.parametrize("peer", bench.PEERS)
def test_a_peer_is_measured_or_left_out_with_the_reason(peer):
    names, notes = measured("--who", peer, "--modes", "one")
    if f"{peer} is left out: " in notes:
        pytest.skip(notes)
    assert f"64 KiB, 4 in flight: {peer}" in names


def test_a_contender_that_nobody_knows_is_refused():
    done = subprocess.run([*BENCH, "--who", "nobody"], capture_output=True, text=True)
    assert done.returncode == 1 and "no contender 'nobody'" in done.stderr
