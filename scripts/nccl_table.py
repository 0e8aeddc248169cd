#!/usr/bin/env python3
"""Makes the table and 40-nccl.json out of the runs that scripts/gpu-nccl.sh left in a folder."""

import collections
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

NETWORKS = {
    "ours": "tcpx, untuned",
    "cuda": "tcpx, CUDA pointers",
    "sealed": "tcpx, encrypted",
    "default": "NCCL's sockets, default",
    "tuned": "NCCL's sockets, 16 channels",
}


# What ours must reach: rates from 64 MiB on, and latencies up to 64 KiB.
MARKS = {
    ("send/recv", "GB/s", "default"): 3.0,
    ("send/recv", "GB/s", "tuned"): 1.2,
    ("all-reduce", "GB/s", "default"): 2.5,
    ("all-reduce", "GB/s", "tuned"): 1.0,
    ("send/recv latency", "us", "default"): 1.1,
    ("all-reduce", "us", "default"): 1.1,
}


def text(size):
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= bytes_:
            return f"{size // bytes_} {unit}"
    return f"{size} B"


def judge(operation, size, unit, medians):
    """Ours against the others, in words, and what falls short of its mark."""
    if "ours" not in medians:
        return "", []
    ratios, missed = [], []
    for network in ("default", "tuned"):
        if network not in medians:
            continue
        # Rates: ours over theirs; times likewise, so there less is better.
        ratio = medians["ours"] / medians[network]
        ratios.append(f"{ratio:.2f} x {network}")
        mark = MARKS.get((operation, unit, network))
        bulk = unit == "GB/s"
        if mark is None or (bulk and size < 64 << 20):
            continue
        if ratio < mark if bulk else ratio > mark:
            missed.append(
                f"{operation}, {text(size)}: {ratio:.2f} x {network}, the mark is {mark}"
            )
    return ", ".join(ratios), missed


def machine():
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    name, driver = lines[0].split(", ")
    cores = len(os.sched_getaffinity(0))
    return f"{len(lines)} x {name}, driver {driver}, {cores} cores, Linux {platform.release()}, loopback TCP"


def main():
    folder = pathlib.Path(sys.argv[1])
    values = collections.defaultdict(list)
    versions = set()
    for network in NETWORKS:
        for file in sorted(folder.glob(f"{network}.*.json")):
            report = json.loads(file.read_text())
            versions.add(f"NCCL {report['nccl']}, PyTorch {report['torch']}")
            for row in report["rows"]:
                unit = "GB/s" if "gb_per_second" in row else "us"
                value = row.get("gb_per_second", row.get("us"))
                values[row["operation"], row["bytes"], unit, network].append(value)
    if not values:
        print("no run gave figures", file=sys.stderr)
        return 1
    rows = []
    below = []
    print(f"{'':32}" + "".join(f"{name:>30}" for name in NETWORKS.values()))
    for operation, size, unit in sorted({key[:3] for key in values}, key=lambda k: (k[0], k[1])):
        cells = []
        for network, name in NETWORKS.items():
            found = values.get((operation, size, unit, network))
            cells.append(f"{statistics.median(found):.2f} {unit}" if found else "-")
            if found:
                rows.append(
                    {
                        "name": f"{operation}, {text(size)}, {name}",
                        "unit": unit,
                        "median": statistics.median(found),
                        "min": min(found),
                        "max": max(found),
                        "runs": len(found),
                    }
                )
        medians = {
            network: statistics.median(values[operation, size, unit, network])
            for network in NETWORKS
            if values.get((operation, size, unit, network))
        }
        ratios, missed = judge(operation, size, unit, medians)
        below += missed
        print(
            f"{operation + ', ' + text(size):32}"
            + "".join(f"{cell:>30}" for cell in cells)
            + f"   {ratios}"
        )
    print("\n".join(below) if below else "every figure is at its mark")
    report = {
        "schema": 1,
        "subject": "Real NCCL over our plugin, between GPUs",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine(),
        "command": "scripts/gpu-nccl.sh OUT_DIR",
        "rows": rows,
        "notes": [
            f"{', '.join(sorted(versions))}, torch.distributed, two processes, one GPU each; P2P and "
            "shared memory are off.",
            "Bandwidth: operations queued one behind the other; all-reduce as bus bandwidth. Latency: "
            "half of a round trip, each message synchronised, median; all-reduce: time of one in a queue. "
            "A run of a rate is one start of both processes, one of a latency is one communicator, four in "
            "each start: where the scheduler puts NCCL's threads changes these by half or more, in each network.",
            "16 channels: NCCL_SOCKET_NTHREADS=1 NCCL_NSOCKS_PERTHREAD=1 NCCL_MIN_NCHANNELS=16 "
            "NCCL_NCHANNELS_PER_NET_PEER=16 NCCL_MIN_P2P_NCHANNELS=16, the best found for bulk.",
            "CUDA pointers: TCPX_NET_DEVICE=cuda CUDA_MODULE_LOADING=EAGER; see docs/nccl.md. Encrypted: "
            "TCPX_KEY and TCPX_ENCRYPT=1.",
            "Both processes run on one host and share its cores; the network is the loopback interface.",
        ],
    }
    (folder / "40-nccl.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
