#!/usr/bin/env python3
"""Makes the table and nccl-one.json out of what scripts/gpu-nccl-one.sh left in a folder; fails if a mark is missed."""

import collections
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys

NETWORKS = {
    "ours": "tcpx",
    "untuned": "tcpx without its tuner",
    "default": "NCCL's sockets, default",
    "tuned": "NCCL's sockets, 4 threads, 4 sockets",
}
# The largest messages that need only be as quick as over NCCL's sockets by default, and how many
# times as quick larger ones must be.
SMALL, MARK = 1 << 20, 1.5

# How NCCL logs what it chose.
CHOSEN = re.compile(r"(AllReduce): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
# From 2.31 on with the cost of the way.
INPUT = re.compile(r"Input: \{.*\.func = (\w+),.*\.nBytes = (\d+)")
BEST = re.compile(r"Best tuning \{.*timeUs = ([-\d.]+),.*\.algo = (\w+), \.proto = (\w+),.*nChannels = (\d+)")


def text(size):
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size >> power} {unit}"
    return f"{size} B"


def machine():
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    name, driver = lines[0].split(", ")
    cores = len(os.sched_getaffinity(0))
    return f"{len(lines)} x {name}, driver {driver}, {cores} cores, Linux {platform.release()}, loopback TCP"


def chosen(lines):
    """What NCCL took for each size, in its own words, once each."""
    found, asked = {}, {}
    for line in lines:
        thread = line.split(" NCCL INFO ")[0]
        if match := INPUT.search(line):
            asked[thread] = match.groups()
        elif match := BEST.search(line):
            function, size = asked.get(thread, ("?", "0"))
            cost, algorithm, protocol, channels = match.groups()
            if function == "AllReduce":
                found.setdefault(int(size), {})["estimate"] = (
                    f"{algorithm}/{protocol}, {channels} channels, cost {float(cost):g} us"
                )
        elif match := CHOSEN.search(line):
            _, size, algorithm, protocol, first, last = match.groups()
            found.setdefault(int(size), {})["taken"] = (
                f"{algorithm}/{protocol}, {int(last) - int(first) + 1} channels"
            )
    return found


def shown(size, microseconds):
    rate = "" if size < 1 << 20 else f", {size / microseconds / 1e3:.1f} GB/s"
    return f"{microseconds:.0f} us{rate}"


def main():
    folder = pathlib.Path(sys.argv[1])
    values, versions, torch = collections.defaultdict(list), [], set()
    sweeps = collections.defaultdict(list)
    for file in sorted(folder.glob("*-*.json")):
        if file.name == "nccl-one.json":
            continue
        step, version = file.stem.split("-", 1)
        report = json.loads(file.read_text())
        if report["nccl"] != version:
            print(f"{file.name}: NCCL {report['nccl']} ran, not {version}", file=sys.stderr)
            return 1
        versions.append(version)
        torch.add(report["torch"])
        for row in report["rows"]:
            name = step.split(".")[0]
            if name in NETWORKS:
                values[version, row["bytes"], name].append(row["us"])
            else:
                sweeps[name, version, row["bytes"], row["channels"]].append(row["us"])
    if not versions:
        print("no step gave a result", file=sys.stderr)
        return 1
    rows, missed, choices = [], [], {}
    for version in sorted(set(versions), key=lambda text: [int(part) for part in text.split(".")]):
        print(f"NCCL {version}")
        log = folder / f"chosen-{version}.txt"
        choices[version] = chosen(log.read_text(errors="replace").splitlines()) if log.exists() else {}
        for size, words in sorted(choices[version].items()):
            print(f"  chosen for {text(size):9} " + "; ".join(f"{key} {value}" for key, value in sorted(words.items())))
        for size in sorted({key[1] for key in values if key[0] == version}):
            medians = {
                name: statistics.median(values[version, size, name])
                for name in NETWORKS if values.get((version, size, name))
            }
            cells = [f"{name} {shown(size, us)}" for name, us in medians.items()]
            if "ours" in medians and "default" in medians:
                ratio = medians["default"] / medians["ours"]
                mark = MARK if size >= SMALL else 1.0
                cells.append(f"{ratio:.2f} x default")
                if ratio < mark:
                    missed.append(f"NCCL {version}, {text(size)}: {ratio:.2f} x NCCL's sockets, the mark is {mark}")
            if "ours" in medians and "tuned" in medians:
                cells.append(f"{medians['tuned'] / medians['ours']:.2f} x tuned")
            print(f"  all-reduce {text(size):9} " + "; ".join(cells))
            for name, median in medians.items():
                found = values[version, size, name]
                rows.append({
                    "name": f"NCCL {version}, all-reduce, {text(size)}, {NETWORKS[name]}", "unit": "us",
                    "median": median, "min": min(found), "max": max(found), "runs": len(found),
                })
    for (name, version, size), found in sorted(group(sweeps).items()):
        words = {"channels": "Simple", "ll": "LL"}.get(name, name)
        print(f"  {words}, NCCL {version}, {text(size):9} " + "; ".join(
            f"{channels} channels {shown(size, us)}" for channels, us in sorted(found.items())))
    print("\n".join(missed) if missed else "every figure is at its mark")
    report = {
        "schema": 1,
        "subject": "Real NCCL, both ranks on one GPU",
        "machine": machine(),
        "command": "scripts/gpu-nccl-one.sh OUT_DIR",
        "rows": rows,
        "choices": choices,
        "sweeps": [
            {"protocol": name, "nccl": version, "bytes": size, "channels": channels, "us": statistics.median(found)}
            for (name, version, size, channels), found in sorted(sweeps.items())
        ],
        "missed": missed,
        "notes": [f"PyTorch {', '.join(sorted(torch))}; all-reduces queued one behind the other; NCCL's library holds "
                  "code for this kind of GPU only"],
    }
    (folder / "nccl-one.json").write_text(json.dumps(report, indent=2) + "\n")
    return 1 if missed else 0


def group(sweeps):
    groups = collections.defaultdict(dict)
    for (name, version, size, channels), found in sweeps.items():
        groups[name, version, size][channels] = statistics.median(found)
    return groups


if __name__ == "__main__":
    sys.exit(main())
