"""The bench of Python: that it measures what it says, whoever is installed."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import tcpx
from tcpx.bench import _net, _nixl, _targets


def test_every_contender_of_ours_is_measured_beside_the_program(tmp_path):
    files = {kind: tmp_path / f"figures.{kind}" for kind in ("csv", "plot", "json")}
    command = [sys.executable, "-m", "tcpx.bench", "--sizes", "64KiB,1MiB", "--in-flight", "1,4"]
    command += ["--rounds", "2", "--span", "0.01", "--peer", "program"]
    for kind, path in files.items():
        command += [f"--{kind}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    contenders = ["tcpx", "tcpx, awaited", "tcpx, put"]
    if tcpx.program_path().exists():
        contenders.append("program")
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    cases = {("latency", "4096", "1")} | {
        ("one", size, depth) for size in ("65536", "1048576") for depth in ("1", "4")
    }
    assert len(rows) == 2 * len(cases) * len(contenders)
    assert {(row["mode"], row["bytes"], row["in_flight"]) for row in rows} == cases
    assert {row["who"] for row in rows} == set(contenders)
    assert all(float(row["gb_per_second"]) > 0 for row in rows)
    assert all(float(row["p50_us"]) > 0 for row in rows if row["mode"] == "latency")
    for who in contenders:
        assert done.stdout.count(f"  {who}  ") == len(cases)
    ElementTree.fromstring(files["plot"].read_text())
    subject = json.loads(files["json"].read_text())
    assert subject["schema"] == 1 and len(subject["rows"]) == len(cases) * len(contenders)
    assert all(row["min"] <= row["median"] <= row["max"] for row in subject["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["nixl", "mooncake", "gloo"])
def test_a_peer_is_measured_or_left_out_with_the_reason(peer):
    command = [sys.executable, "-m", "tcpx.bench", "--sizes", "64KiB", "--latency", "", "--in-flight", "2"]
    command += ["--rounds", "1", "--span", "0.01", "--only", "tcpx", "--peer", peer]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if f"{peer} is left out: " in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert f"  {peer}  " in done.stdout and "tcpx has " in done.stdout


def test_cases_are_bounded_and_named():
    cases = _net.chosen_cases([8, 64 << 20, 1 << 30], [4096], [1, 8])
    assert [case.name for case in cases] == [
        "4 KiB, half a round trip", "8 B, 1 in flight", "8 B, 8 in flight",
        "64 MiB, 1 in flight", "64 MiB, 2 in flight", "1 GiB, 1 in flight",
    ]
    assert _net.PRESETS["uccl"][0] == 8 and _net.PRESETS["nixl"][-1] == 64 << 20
    done = subprocess.run(
        [sys.executable, "-m", "tcpx.bench", "--peer", "nobody"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "no contender 'nobody'" in done.stderr


def test_a_target_is_reached_missed_or_not_measured():
    def verdict(least: bool, found: float | None) -> str:
        must, aim = (1.5, 2.5) if least else (5.0, 2.0)
        return _targets.Row("row", must, aim, "", least, found, "").verdict

    assert [verdict(True, found) for found in (2.5, 1.5, 1.4, None)] == ["aim", "must", "MISSED", "not measured"]
    assert [verdict(False, found) for found in (2.0, 5.0, 5.1, None)] == ["aim", "must", "MISSED", "not measured"]


def test_a_case_of_nixl_that_takes_too_long_is_told_and_the_rest_is_measured(tmp_path, monkeypatch):
    # In place of the bench's own process: its second case never ends.
    process = tmp_path / "process.py"
    process.write_text("""
import json, sys, time
without = json.loads(sys.argv[sys.argv.index("--without") + 1])
open(__file__ + ".begun", "a").write("begun ")
for case in ("one", "two", "three"):
    if case not in without:
        print("CASE", case, flush=True)
        if case == "two":
            time.sleep(600)
        print("RESULT", json.dumps([case, 0.5, 10**9]), flush=True)
print("ENDED", flush=True)
""")
    monkeypatch.setattr(_nixl, "__file__", str(process))
    # The other cases print two lines.
    found, failed = _nixl.in_turns(["tcpx", "ucx-tcp"], 2, limit=3.0)
    assert not failed
    expected = {"one": (0.5, 10**9), "two": (3.0, _nixl.SLOW), "three": (0.5, 10**9)}
    assert found == {"tcpx": [expected] * 2, "ucx-tcp": [expected] * 2}
    # Once for each peer a process was ended, and no second round began that case.
    assert (tmp_path / "process.py.begun").read_text().split() == ["begun"] * 6
    assert _nixl.cell([expected["two"]] * 2) == "more than 3 s"
    assert _nixl.ratio([expected["one"]], [expected["two"]]) == "-"


def test_a_process_of_nixls_bench_that_dies_is_a_failure(tmp_path, monkeypatch, capsys):
    process = tmp_path / "process.py"
    process.write_text("print('CASE one', flush=True); raise SystemExit('it broke')")
    monkeypatch.setattr(_nixl, "__file__", str(process))
    assert _nixl.in_turns(["tcpx"], 1) == ({"tcpx": [{}]}, True)
    assert "tcpx failed at one" in capsys.readouterr().err


@pytest.mark.slow
def test_one_command_measures_every_target(tmp_path):
    path = tmp_path / "targets.json"
    command = [sys.executable, "-m", "tcpx.bench", "targets", "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    names = [row["name"] for row in rows]
    assert sum(name.startswith("4 KiB round trip") for name in names) == 2
    assert any(name.startswith("send and receive") for name in names)
    # Rows whose contenders are not here say so.
    for row in rows:
        assert (row["found"] is None) == (row["verdict"] == "not measured")
        assert f"| {row['name']} |" in done.stdout
