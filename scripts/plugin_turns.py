#!/usr/bin/env python3
"""Compares plugin files of any maker on this host, in turns, over loopback and host memory.

    cargo build --release --package tcpx-gate --package tcpx-nccl
    scripts/plugin_turns.py ours=target/release/libnccl_net_tcpx.so other=PATH,VARIABLE=VALUE

The driver of the gate (tcpx-gate) calls each file's table v8 as NCCL does: two processes, one thread each that posts
and tests. A round starts fresh processes for each file and runs each case with all of them, one after the other, in an
order that changes from round to round; so what changes slowly on a shared machine meets all of them. The table shows
medians with quartiles in GB/s, and the median of each round's ratio of the first file to each of the others with its
95 % interval by bootstrap.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

SIZES = {"64KiB": 64 << 10, "128KiB": 128 << 10, "256KiB": 256 << 10, "512KiB": 512 << 10, "4MiB": 4 << 20}


class Driver:
    """A pair of processes that drive one file."""

    def __init__(self, program, path, variables):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "TCPX_"))}
        chosen = {"TCPX_GATE_PLUGIN": path, "NCCL_SOCKET_IFNAME": "=lo"} | variables
        self.child = subprocess.Popen(
            [program, "run"], env=kept | chosen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, size, window, milliseconds):
        case = {"kind": "plugin", "size": size, "comms": 1, "window": window, "ms": milliseconds}
        self.child.stdin.write(json.dumps(case) + "\n")
        self.child.stdin.flush()
        answer = json.loads(self.child.stdout.readline() or '{"error": "the driver has gone"}')
        if "error" in answer:
            sys.exit(f"error: {answer['error']}")
        return answer["figures"]["rate"] / 1e9

    def end(self):
        self.child.stdin.close()
        self.child.wait()


def contender(text):
    name, _, rest = text.partition("=")
    path, *variables = rest.split(",")
    if not path:
        raise argparse.ArgumentTypeError(f"expected NAME=FILE[,VARIABLE=VALUE]..., {text!r} was given")
    return name, str(pathlib.Path(path).resolve()), dict(one.split("=", 1) for one in variables)


def interval(ratios):
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=contender, metavar="NAME=FILE[,VARIABLE=VALUE]...")
    parser.add_argument("--driver", default="target/release/tcpx-gate")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ms", type=int, default=150, help="milliseconds of each measurement")
    parser.add_argument("--size", action="append", choices=SIZES, help="all of them by default")
    parser.add_argument("--window", action="append", type=int, help="messages in flight; 1 and 8 by default")
    parser.add_argument("--out", help="file for all samples, as JSON")
    arguments = parser.parse_args()
    cases = [(size, window) for size in arguments.size or SIZES for window in arguments.window or (1, 8)]
    names = [name for name, _, _ in arguments.files]
    samples = {case: {name: [] for name in names} for case in cases}
    for number in range(arguments.rounds):
        drivers = {name: Driver(arguments.driver, path, variables) for name, path, variables in arguments.files}
        turn = names[number % len(names):] + names[:number % len(names)]
        for at, case in enumerate(cases):
            for name in turn if at % 2 else reversed(turn):
                rate = drivers[name].measure(SIZES[case[0]], case[1], arguments.ms)
                samples[case][name].append(rate)
        for driver in drivers.values():
            driver.end()
    first, *others = names
    print("| case | " + " | ".join(names) + " | " + " | ".join(f"{first} / {other}" for other in others) + " |")
    print("|---" * (1 + len(names) + len(others)) + "|")
    for case in cases:
        row = [f"{case[0]} x{case[1]}"]
        for name in names:
            low, middle, high = statistics.quantiles(samples[case][name], n=4)
            row.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        for other in others:
            ratios = [one / two for one, two in zip(samples[case][first], samples[case][other])]
            low, high = interval(ratios)
            row.append(f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")
        print("| " + " | ".join(row) + " |")
    if arguments.out:
        kept = {f"{size} x{window}": by_name for (size, window), by_name in samples.items()}
        pathlib.Path(arguments.out).write_text(json.dumps({"rounds": arguments.rounds, "gb_per_s": kept}, indent=1))


if __name__ == "__main__":
    main()
