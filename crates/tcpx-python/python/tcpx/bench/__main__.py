"""Runs the bench that the first argument names; that of sends, receives and puts without one."""

from __future__ import annotations

import sys

from . import _net, _nixl, _targets


def main() -> None:
    if sys.argv[1:2] == ["nixl"]:
        _nixl.main(sys.argv[2:])
    elif sys.argv[1:2] == ["targets"]:
        _targets.main(sys.argv[2:])
    else:
        _net.main(sys.argv[1:])


if __name__ == "__main__":
    main()
