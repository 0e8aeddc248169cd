"""Runs the bench that the first argument names."""

from __future__ import annotations

import sys

from . import _nixl


def main() -> None:
    if sys.argv[1:2] != ["nixl"]:
        raise SystemExit("usage: python -m tcpx.bench nixl [--help]")
    _nixl.main(sys.argv[2:])


if __name__ == "__main__":
    main()
