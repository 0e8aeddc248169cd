"""What the project wants of the package and of the NIXL backend, measured on this host: one table.

Contenders that are not installed are left out, with the rows that need them. Nothing is fetched. Figures are
medians over the rounds; `must` and `aim` are the bounds of each row, and all bounds are for a host with two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import _net, _nixl
from ._contenders import OURS, PEERS

MIB = _net.MIB
SIZES = (MIB, 16 * MIB, 64 * MIB, 256 * MIB)


@dataclass(frozen=True)
class Row:
    """One target. `least`: the figure must be at least `must`; else at most."""

    name: str
    must: float
    aim: float
    unit: str
    least: bool
    found: float | None
    how: str

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        for bound, word in ((self.aim, "aim"), (self.must, "must")):
            if self.found >= bound if self.least else self.found <= bound:
                return word
        return "MISSED"

    def line(self) -> str:
        sign = ">=" if self.least else "<="
        found = "-" if self.found is None else f"{self.found:.2f}{self.unit}"
        bounds = f"{sign} {self.must:g}{self.unit} | {sign} {self.aim:g}{self.unit}"
        return f"| {self.name} | {bounds} | {found} | {self.verdict} | {self.how} |"


def of_package(figures: list[_net.Figure]) -> list[Row]:
    by: dict[tuple[_net.Case, str], list[_net.Figure]] = {}
    for figure in figures:
        by.setdefault((figure.case, figure.who), []).append(figure)

    def value(case: _net.Case, who: str, field: str) -> float | None:
        return _net.median(by.get((case, who), []), field)

    rows: list[Row] = []
    case = _net.Case("one", 16 * MIB, 8)
    ours, program = value(case, "tcpx", "rate"), value(case, _net.PROGRAM, "rate")
    ratio = ours / program if ours and program else None
    how = f"{ours:.2f} and {program:.2f} GB/s" if ours and program else ""
    rows.append(Row("send and receive, 16 MiB x 8, beside the program", 0.95, 1.0, "", True, ratio, how))
    case = _net.Case("latency", 4096, 1)
    for who, must, aim in (("tcpx", 5.0, 2.0), ("tcpx, awaited", 25.0, 12.0)):
        half, other = value(case, who, "p50"), value(case, _net.PROGRAM, "p50")
        more = 2 * (half - other) if half and other else None
        how = f"{2 * half:.1f} and {2 * other:.1f} us" if half and other else ""
        name = f"4 KiB round trip, {who}, above the program"
        rows.append(Row(name, must, aim, " us", False, more, how))
    for case in dict.fromkeys(figure.case for figure in figures):
        if case.mode != "one":
            continue
        rates = {who: rate for who in (*OURS, *PEERS) if (rate := value(case, who, "rate"))}
        best = max((who for who in OURS if who in rates), key=lambda who: rates[who], default=None)
        rival = max((who for who in PEERS if who in rates), key=lambda who: rates[who], default=None)
        ratio = rates[best] / rates[rival] if best and rival else None
        how = ", ".join(f"{who} {rate:.2f}" for who, rate in rates.items()) + " GB/s"
        rows.append(Row(f"{case.name}, beside the best of {', '.join(PEERS)}", 1.5, 2.5, "", True, ratio, how))
    return rows


def of_nixl(found: dict[str, list[_nixl.Figures]]) -> list[Row]:
    def seconds(peer: str, name: str) -> float | None:
        values = [figures[name] for figures in found.get(peer, []) if name in figures]
        times = [took for took, moved in values if moved != _nixl.SLOW]
        return statistics.median(times) if times else None

    rows: list[Row] = []
    names = dict.fromkeys(name for figures in found.get("tcpx", []) for name in figures)
    for name in names:
        ours, theirs = seconds("tcpx", name), seconds("ucx-tcp", name)
        moved = next(figures[name][1] for figures in found["tcpx"] if name in figures)
        if ours and name.startswith("posting"):
            rows.append(Row(f"NIXL: {name}", 5.0, 1.0, " ms", False, ours * 1e3, ""))
            continue
        if not moved:
            ratio = ours / theirs if ours and theirs else None
            how = f"{ours * 1e6:.1f} and {theirs * 1e6:.1f} us" if ours and theirs else ""
            rows.append(Row(f"NIXL: {name}, of UCX's time", 1.0, 0.5, "", False, ratio, how))
            continue
        ratio = theirs / ours if ours and theirs else None
        rates = [f"{moved / took / 1e9:.2f} GB/s" if took else "nothing in the time given" for took in (ours, theirs)]
        how = " and ".join(rates)
        is_list = any(name.startswith(listed) for listed, _, _ in _nixl.LISTS)
        must, aim = (2.0, 4.0) if is_list else (1.5, 2.5)
        rows.append(Row(f"NIXL: {name}, beside UCX over TCP", must, aim, "", True, ratio, how))
    return rows


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tcpx.bench targets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--span", type=float, default=0.25, help="seconds of a measurement")
    only = "the rows of the package, or of NIXL's backend, alone"
    parser.add_argument("--only", default="", choices=["package", "nixl"], help=only)
    parser.add_argument("--limit", type=float, default=_nixl.CASE_LIMIT, help="seconds of a case of NIXL at most")
    parser.add_argument("--quick", action="store_true", help="one short round of a few cases, to see that it works")
    parser.add_argument("--json", type=Path, help="write the rows, and every figure behind them")
    options = parser.parse_args(arguments)
    rounds, span = (1, 0.02) if options.quick else (options.rounds, options.span)
    sizes = SIZES[:2] if options.quick else SIZES
    figures: list[_net.Figure] = []
    notes: list[str] = []
    rows: list[Row] = []
    if options.only != "nixl":
        cases = _net.chosen_cases(list(sizes), [4096], [1, 8])
        figures, notes = _net.measure(cases, [*OURS, _net.PROGRAM, *PEERS], rounds, span)
        rows = of_package(figures)
    found: dict[str, list[_nixl.Figures]] = {"tcpx": [], "ucx-tcp": []}
    failed = any(note.startswith("tcpx") for note in notes)
    if options.only != "package" and not any(note.startswith("nixl ") for note in notes):
        for group in ("small",) if options.quick else ("small", "sizes", "lists"):
            of, without = _nixl.in_turns(
                list(found), rounds, only=group, quick=options.quick, limit=options.limit
            )
            failed |= without
            for peer, one in of.items():
                found[peer] += one
        rows += of_nixl(found)
    print("\n| row | must | aim | found | reached | how |")
    print("|---" * 6 + "|")
    for row in rows:
        print(row.line())
    if figures:
        print()
        print(_net.table(figures))
    if options.json:
        told = [{**vars(row), "verdict": row.verdict} for row in rows]
        keep: Callable[[_net.Figure], object] = lambda one: {**vars(one), "case": one.case.name}  # noqa: E731
        what = {"rows": told, "figures": [keep(one) for one in figures], "nixl": found, "notes": notes}
        options.json.write_text(json.dumps(what, indent=1) + "\n")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main([])
