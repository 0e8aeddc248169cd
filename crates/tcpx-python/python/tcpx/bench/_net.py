"""tcpx from Python beside others, between two processes of this host, over loopback TCP and host memory.

The contenders of a case take turns within each round; figures are medians over the rounds. `tcpx` sends and receives,
`tcpx, awaited` does so in an event loop, `tcpx, put` writes into a window. Beside them, where they are installed:
`program` (the program tcpx), `nixl` (its UCX backend over TCP, as between hosts without RDMA), `mooncake` and
`gloo` (torch.distributed). What arrives is compared before it is timed. One side that only receives is idle
meanwhile, but both share the cores of this host.

`--sizes uccl` and `--sizes nixl` are the sizes of UCCL's benchmark and of nixlbench.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tcpx

from ._contenders import LIMIT, OURS, PEERS, serve
from ._plot import plot

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PRESETS = {
    "uccl": [1 << power for power in range(3, 21)],
    "nixl": [1 << power for power in range(12, 27)],
}
DEFAULT_SIZES = "4KiB,64KiB,1MiB,16MiB,64MiB,256MiB"
# Bytes in flight at most, unless one message is longer.
IN_FLIGHT_BYTES = 128 * MIB
PROGRAM = "program"
COLUMNS = (
    "mode,bytes,in_flight,who,round,gb_per_second,p50_us,p90_us,p99_us,max_us,"
    "cpu_s_per_gb_here,cpu_s_per_gb_there"
).split(",")


def parse_size(text: str) -> int:
    for unit, factor in (("KiB", KIB), ("MiB", MIB), ("GiB", GIB), ("B", 1), ("", 1)):
        if text.endswith(unit):
            try:
                return int(text[: len(text) - len(unit)]) * factor
            except ValueError:
                break
    raise argparse.ArgumentTypeError(f"{text!r} is no size; expected one such as 4KiB")


def show_size(size: int) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


@dataclass(frozen=True)
class Case:
    """What is measured: `latency` is half of a round trip, `one` a stream in one direction."""

    mode: str
    size: int
    depth: int

    @property
    def name(self) -> str:
        if self.mode == "latency":
            return f"{show_size(self.size)}, half a round trip"
        return f"{show_size(self.size)}, {self.depth} in flight"


@dataclass
class Figure:
    """One measurement. Rates are GB/s, times microseconds, processor time is seconds for 10^9 bytes."""

    case: Case
    who: str
    round: int
    rate: float
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    longest: float | None = None
    here: float | None = None
    there: float | None = None


class Pair:
    """The two processes of a contender."""

    def __init__(self, name: str, size: int) -> None:
        context = get_context("spawn")
        ends = context.Pipe()
        self.name = name
        self.orders, self.processes = [], []
        for side, end in zip(("here", "there"), ends, strict=True):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(name, side, size, theirs, end))
            process.start()
            theirs.close()
            self.orders.append(ours)
            self.processes.append(process)
        for end in ends:
            end.close()
        for pipe in self.orders:
            self._answer(pipe)

    def _answer(self, pipe: Any) -> Any:
        try:
            if not pipe.poll(LIMIT):
                raise OSError("it does not answer")
            kind, what = pipe.recv()
        except (OSError, EOFError) as error:
            self.kill()
            raise OSError(f"{self.name}: {error}") from None
        if kind == "failed":
            self.kill()
            raise OSError(what)
        return what

    def pause(self, paused: bool) -> None:
        """Stops a peer's processes, or lets them go on: some poll without end, also while others are measured."""
        if self.name in PEERS:
            for process in self.processes:
                if process.pid is not None and process.is_alive():
                    os.kill(process.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def order(self, what: str, *arguments: int) -> list[Any]:
        # The receiver first.
        for pipe in reversed(self.orders):
            pipe.send((what, arguments))
        return [self._answer(pipe) for pipe in self.orders]

    def compare(self, size: int) -> None:
        ours, theirs = self.order("digest", size)
        if ours != theirs:
            self.kill()
            raise OSError("what arrived is not what was sent")

    def _each(self, case: Case, count: int) -> float:
        """Seconds that each of so many messages takes."""
        started = time.perf_counter()
        self.order("stream", case.size, case.depth, count)
        return (time.perf_counter() - started) / count

    def measure(self, case: Case, span: float, number: int) -> Figure | None:
        if case.mode == "latency":
            if self.name == "mooncake":
                return None
            warm = self.order("latency", case.size, 20)[0][0]
            count = max(20, min(20_000, int(span / (warm / 20))))
            (_, here, took), (_, there, _) = self.order("latency", case.size, count)
            halves = sorted(seconds / 2 * 1e6 for seconds in took)
            moved = 2 * case.size * count / 1e9
            return Figure(
                case, self.name, number, moved / sum(took), statistics.median(halves),
                halves[int(count * 0.9)], halves[int(count * 0.99)], halves[-1], here / moved, there / moved,
            )
        each = self._each(case, case.depth)
        self.compare(case.size)
        if each * 2 * case.depth < span:
            # The first had to grow its windows and touch its pages.
            each = self._each(case, 2 * case.depth)
        count = max(case.depth, int(span / each))
        (seconds, here, _), (_, there, _) = self.order("stream", case.size, case.depth, count)
        moved = case.size * count / 1e9
        rate = moved / seconds
        return Figure(case, self.name, number, rate, here=here / moved, there=there / moved)

    def close(self) -> None:
        for pipe in self.orders:
            pipe.send(("end", ()))
        for process in self.processes:
            process.join(10)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def of_program(case: Case, span: float, number: int) -> Figure:
    """The same case with the program, which starts a second process of its own."""
    command = [str(tcpx.program_path()), "bench", "net", "--from", "host", "--to", "host"]
    command += ["--rounds", "1", "--span", f"{span * 1000:.0f}ms"]
    kind = f"{case.mode}:{case.size}" + (f":{case.depth}" if case.mode == "one" else "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.csv"
        command += ["--case", kind, "--csv", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(done.stderr.strip().splitlines()[-1])
        with path.open() as file:
            row = next(csv.DictReader(file))

    def value(column: str) -> float | None:
        return float(row[column]) if row[column] else None

    figure = Figure(case, PROGRAM, number, float(row["gb_per_second"]))
    if case.mode == "latency":
        figure.p50, figure.p90 = value("p50_us"), value("p90_us")
        figure.p99, figure.longest = value("p99_us"), value("max_us")
    figure.here, figure.there = value("cpu_s_per_gb_here"), value("cpu_s_per_gb_there")
    return figure


def measure(
    cases: list[Case], names: list[str], rounds: int, span: float
) -> tuple[list[Figure], list[str]]:
    """Every figure, and whom it could not measure."""
    size = max(case.size * max(case.depth, 2) for case in cases)
    pairs: dict[str, Pair | None] = {}
    figures: list[Figure] = []
    left_out: list[str] = []

    def leave_out(name: str, why: object) -> None:
        left_out.append(f"{name} is left out: {why}")
        print(left_out[-1], file=sys.stderr)
        pairs.pop(name, None)

    try:
        for name in names:
            if name == PROGRAM:
                if tcpx.program_path().exists():
                    pairs[name] = None
                else:
                    leave_out(name, "it comes with an installed package alone")
                continue
            try:
                begun = pairs[name] = Pair(name, size)
                begun.pause(True)
            except OSError as error:
                leave_out(name, error)
        for number in range(rounds):
            for case in cases:
                # Nobody is always the first.
                turns = list(pairs)
                first = number % max(len(turns), 1)
                for name in turns[first:] + turns[:first]:
                    pair = pairs[name]
                    try:
                        if pair is None:
                            figure: Figure | None = of_program(case, span, number)
                        else:
                            pair.pause(False)
                            figure = pair.measure(case, span, number)
                            pair.pause(True)
                    except OSError as error:
                        leave_out(name, error)
                        continue
                    if figure is not None:
                        figures.append(figure)
    finally:
        # Also after an interrupt: what is stopped would never end.
        for ended in pairs.values():
            if ended is not None:
                ended.pause(False)
                ended.close()
    return figures, left_out


def rows(figures: list[Figure]) -> list[tuple[Case, str, list[Figure]]]:
    """The figures of each contender of each case, in the order of their first."""
    found: dict[tuple[Case, str], list[Figure]] = {}
    for figure in figures:
        found.setdefault((figure.case, figure.who), []).append(figure)
    cases = list(dict.fromkeys(figure.case for figure in figures))
    whos = list(dict.fromkeys([*OURS, PROGRAM, *PEERS]))
    return [
        (case, who, found[case, who]) for case in cases for who in whos if (case, who) in found
    ]


def median(figures: list[Figure], field: str) -> float | None:
    values = [value for figure in figures if (value := getattr(figure, field)) is not None]
    return statistics.median(values) if values else None


def table(figures: list[Figure]) -> str:
    """As the program's `bench net`: a line for each contender of each case."""

    def shown(value: float | None, digits: int, unit: str = "") -> str:
        return "" if value is None else f"{value:.{digits}f}{unit}"

    head = ["message", "who", "GB/s", "least", "most", "p50", "p99", "CPU s/GB", "there", "beside"]
    lines = [head]
    ours: dict[Case, list[Figure]] = {}
    for case, who, found in rows(figures):
        rates = [figure.rate for figure in found]
        if who == "tcpx":
            ours[case] = found
        beside = ""
        if who != "tcpx" and case in ours:
            if case.mode == "latency":
                one, other = median(ours[case], "p50"), median(found, "p50")
                beside = f"tcpx takes {one / other:.2f} of it" if one and other else ""
            else:
                factor = statistics.median(figure.rate for figure in ours[case]) / statistics.median(rates)
                beside = f"tcpx has {factor:.2f} of it"
        lines.append([
            case.name, who, shown(statistics.median(rates), 3), shown(min(rates), 3), shown(max(rates), 3),
            shown(median(found, "p50"), 1, " us"), shown(median(found, "p99"), 1, " us"),
            shown(median(found, "here"), 3), shown(median(found, "there"), 3), beside,
        ])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    texts = []
    for line in lines:
        left = [line[0].ljust(widths[0]), line[1].ljust(widths[1])]
        right = [cell.rjust(width) for cell, width in zip(line[2:-1], widths[2:-1], strict=True)]
        texts.append("  ".join([*left, *right, line[-1]]).rstrip())
    texts.insert(1, "-" * max(map(len, texts)))
    return "\n".join(texts)


def write_csv(path: Path, figures: list[Figure]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for figure in figures:
            case = figure.case
            values = (
                figure.rate, figure.p50, figure.p90, figure.p99, figure.longest, figure.here, figure.there,
            )
            texts = ["" if value is None else f"{value:.4f}" for value in values]
            writer.writerow([case.mode, case.size, case.depth, figure.who, figure.round, *texts])


def as_json(figures: list[Figure], command: str, notes: list[str]) -> str:
    """A file of `benchmarks/`."""
    machine = os.uname()
    found = []
    for case, who, of in rows(figures):
        is_rate = case.mode != "latency"
        values = [figure.rate if is_rate else figure.p50 or 0.0 for figure in of]
        row: dict[str, Any] = {
            "name": f"{case.name}: {who}" + ("" if is_rate else ", p50"),
            "unit": "GB/s" if is_rate else "us",
            "median": round(statistics.median(values), 3),
            "min": round(min(values), 3),
            "max": round(max(values), 3),
            "runs": len(values),
        }
        here, there = median(of, "here"), median(of, "there")
        if is_rate and here is not None and there is not None:
            row["cpu_seconds_per_gb"] = round(here + there, 3)
            row["cpu_seconds_per_gb_each"] = [round(here, 3), round(there, 3)]
        found.append(row)
    subject = {
        "schema": 1,
        "subject": "From Python, host memory, beside the program and other libraries",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"host memory, {os.cpu_count()} cores, {machine.sysname} {machine.release}, loopback TCP; "
        "both ends share the cores",
        "command": command,
        "rows": found,
        "notes": notes,
    }
    return json.dumps(subject, indent=2) + "\n"


def chosen_cases(sizes: list[int], latencies: list[int], depths: list[int]) -> list[Case]:
    cases = [Case("latency", size, 1) for size in latencies]
    for size in sizes:
        most = max(1, IN_FLIGHT_BYTES // size)
        for depth in sorted({min(depth, most) for depth in depths}):
            cases.append(Case("one", size, depth))
    return cases


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tcpx.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", default=DEFAULT_SIZES, help=f"sizes between commas, or {' or '.join(PRESETS)}; {DEFAULT_SIZES} by default")
    parser.add_argument("--latency", default="4KiB", help="sizes of round trips; 4KiB by default")
    parser.add_argument("--in-flight", default="1,8", help=f"messages in flight, up to {show_size(IN_FLIGHT_BYTES)} in all; 1,8 by default")
    parser.add_argument("--peer", default="", help=f"of {', '.join([PROGRAM, *PEERS])}")
    parser.add_argument("--only", default="", help=f"of {'; '.join(OURS)}: fewer of our own, between semicolons")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--span", type=float, default=0.25, help="seconds of a measurement")
    parser.add_argument("--csv", type=Path, help="write every figure as comma-separated values")
    parser.add_argument("--plot", type=Path, help="write a plot of the rates as SVG")
    parser.add_argument("--json", type=Path, help="write the figures as a file of the repository's benchmarks/")
    options = parser.parse_args(arguments)
    try:
        texts = options.sizes.split(",")
        sizes = PRESETS.get(options.sizes) or [parse_size(text) for text in texts]
        latencies = [parse_size(text) for text in options.latency.split(",") if text]
        depths = [int(text) for text in options.in_flight.split(",")]
    except (argparse.ArgumentTypeError, ValueError) as error:
        parser.error(str(error))
    peers = [name for name in options.peer.split(",") if name]
    ours = [name.strip() for name in options.only.split(";")] if options.only else list(OURS)
    for name in [*peers, *ours]:
        if name not in (PROGRAM, *PEERS, *OURS):
            parser.error(f"there is no contender {name!r}")
    cases = chosen_cases(sizes, latencies, depths)
    figures, left_out = measure(cases, [*ours, *peers], options.rounds, options.span)
    if not figures:
        raise SystemExit("nothing was measured")
    print(table(figures))
    if options.csv:
        write_csv(options.csv, figures)
    if options.plot:
        options.plot.write_text(plot([(case.name, who, statistics.median(one.rate for one in of)) for case, who, of in rows(figures) if case.mode == "one"]))
    if options.json:
        command = " ".join(["python -m tcpx.bench", *arguments])
        options.json.write_text(as_json(figures, command, left_out))
    if any(text.startswith("tcpx") for text in left_out):
        raise SystemExit(1)
