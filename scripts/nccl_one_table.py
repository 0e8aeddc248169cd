#!/usr/bin/env python3
"""Makes the table and nccl-one.json out of what scripts/gpu-nccl-one.sh left in a folder; fails if a mark is missed."""

import collections
import json
import pathlib
import re
import statistics
import sys

from nccl_report import row, text, write

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
        name = step.split(".")[0]
        for one in report["rows"]:
            if name in NETWORKS:
                values[version, one["bytes"], name].append(one["us"])
            else:
                sweeps[name, version, one["bytes"], one["channels"]].append(one["us"])
    if not versions:
        print("no step gave a result", file=sys.stderr)
        return 1
    rows, missed = [], []
    notes = [f"PyTorch {', '.join(sorted(torch))}; all-reduces queued one behind the other; NCCL's library holds code for "
             "this kind of GPU only."]
    for version in sorted(set(versions), key=lambda text: [int(part) for part in text.split(".")]):
        print(f"NCCL {version}")
        log = folder / f"chosen-{version}.txt"
        choices = chosen(log.read_text(errors="replace").splitlines()) if log.exists() else {}
        for size, words in sorted(choices.items()):
            choice = "; ".join(f"{key} {value}" for key, value in sorted(words.items()))
            print(f"  chosen for {text(size):9} {choice}")
            notes.append(f"NCCL {version} over tcpx, {text(size)}: {choice}.")
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
            for name in medians:
                label = f"NCCL {version}, all-reduce, {text(size)}, {NETWORKS[name]}"
                rows.append(row(label, "us", values[version, size, name]))
    for (name, version, size, channels), found in sorted(sweeps.items()):
        protocol = {"channels": "Simple", "ll": "LL"}.get(name, name)
        label = f"NCCL {version}, all-reduce, {text(size)}, tcpx without its tuner, {protocol}, {channels} channels"
        print(f"  {label}: {shown(size, statistics.median(found))}")
        rows.append(row(label, "us", found))
    print("\n".join(missed) if missed else "every figure is at its mark")
    notes += [f"{one}." for one in missed]
    write(folder / "nccl-one.json", "Real NCCL, both ranks on one GPU", "scripts/gpu-nccl-one.sh OUT_DIR", rows, notes)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
