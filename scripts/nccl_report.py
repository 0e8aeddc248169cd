"""What the programs that time NCCL have in common: names of sizes, rows and files of figures (benchmarks/README.md)."""

import json
import os
import platform
import statistics
import subprocess
import time


def text(size):
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size >> power} {unit}"
    return f"{size} B"


def row(name, unit, values):
    """One figure: the spread over runs."""
    return {
        "name": name, "unit": unit, "median": statistics.median(values), "min": min(values), "max": max(values),
        "runs": len(values),
    }


def machine():
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    name, driver = lines[0].split(", ")
    cores = len(os.sched_getaffinity(0))
    return f"{len(lines)} x {name}, driver {driver}, {cores} cores, Linux {platform.release()}, loopback TCP"


def write(path, subject, command, rows, notes):
    report = {
        "schema": 1, "subject": subject, "date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine(),
        "command": command, "rows": rows, "notes": notes,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
