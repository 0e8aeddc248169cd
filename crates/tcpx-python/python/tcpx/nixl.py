"""The backend ``TCPX`` of NIXL: where its plugin is, and whether it works on this host.

``python -m tcpx.nixl --check`` makes two agents, and moves memory between them both ways.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BACKEND = "TCPX"
_FILE = "libplugin_TCPX.so"
_WHEELS = ("nixl_cu12", "nixl_cu13")
_LIMIT = 60.0
_SIZES = (1, 4096, 1 << 20, 32 << 20)
_PIECES = 2000


def plugin_path() -> Path:
    """The plugin that comes with this package: NIXL finds it by itself where its wheel is
    installed in the same environment; else set ``NIXL_PLUGIN_DIR`` to its folder."""
    site = Path(__file__).resolve().parent.parent
    for wheel in _WHEELS:
        path = site / f".{wheel}.mesonpy.libs" / "plugins" / _FILE
        if path.exists():
            return path
    raise FileNotFoundError(f"{_FILE} is not beside {site}; install the wheel of tcpx again")


def _folder() -> Path | None:
    """Where NIXL looks for plugins, as far as it can be known from outside."""
    named = os.environ.get("NIXL_PLUGIN_DIR")
    if named:
        return Path(named)
    for wheel in _WHEELS:
        found = importlib.util.find_spec(wheel)
        if found and found.origin:
            return Path(found.origin).parent.parent / f".{wheel}.mesonpy.libs" / "plugins"
    return None


def _api() -> Any:
    why: list[str] = []
    for name in ("nixl", *_WHEELS):
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError as error:
            why.append(f"{name}: {error}")
    raise SystemExit("NIXL cannot be imported; pip install nixl. " + "; ".join(why))


def _finish(agent: Any, handle: Any) -> None:
    state = agent.transfer(handle)
    until = time.monotonic() + _LIMIT
    while state == "PROC" and time.monotonic() < until:
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    if state != "DONE":
        raise SystemExit(f"FAILED: a transfer ended with {state}")


def check(say: Callable[[str], object] = print) -> None:
    """Makes two agents with the backend, moves memory between them and compares it.

    Ends the program with a reason if that does not work, or raises NIXL's own error.
    """
    folder = _folder()
    say(f"NIXL looks for plugins in {folder or 'a folder that is not known'}")
    api = _api()
    config = api.nixl_agent_config(backends=[])
    absent = (
        f"FAILED: {BACKEND} is not among them; link {plugin_path()} into that folder, "
        "or unset NIXL_PLUGIN_DIR"
    )
    try:
        one, other = (api.nixl_agent(f"tcpx check {number}", config) for number in (1, 2))
    except RuntimeError:
        # NIXL makes no agent where its folder has no plugin at all.
        say("plugins: none")
        raise SystemExit(absent) from None
    plugins = sorted(one.get_plugin_list())
    say(f"plugins: {', '.join(plugins)}")
    if BACKEND not in plugins:
        raise SystemExit(absent)
    for agent in (one, other):
        agent.create_backend(BACKEND)
    size = max(*_SIZES, _PIECES * 8192)
    source, target = (ctypes.create_string_buffer(size) for _ in range(2))
    content = os.urandom(1 << 20)
    source.raw = (content * (size // len(content) + 1))[:size]
    a, b = ctypes.addressof(source), ctypes.addressof(target)
    held = [
        (agent, agent.register_memory([(address, size, 0, "")], "DRAM"))
        for agent, address in ((one, a), (other, b))
    ]
    one.add_remote_agent(other.get_agent_metadata())
    lists = [[(0, count)] for count in _SIZES]
    lists.append([(at * 8192, 4096) for at in range(_PIECES)])
    for pieces in lists:
        for operation, read, written in (("WRITE", source, target), ("READ", target, source)):
            ctypes.memset(ctypes.addressof(written), 0, size)
            handle = one.initialize_xfer(
                operation,
                one.get_xfer_descs([(a + at, count, 0) for at, count in pieces], "DRAM"),
                one.get_xfer_descs([(b + at, count, 0) for at, count in pieces], "DRAM"),
                "tcpx check 2",
                b"behind",
            )
            started = time.perf_counter()
            _finish(one, handle)
            took = time.perf_counter() - started
            for at, count in pieces:
                if read[at : at + count] != written[at : at + count]:
                    raise SystemExit(f"FAILED: {operation} of {count} bytes at {at} differs")
            until = time.monotonic() + _LIMIT
            while not other.get_new_notifs():
                if time.monotonic() > until:
                    raise SystemExit("FAILED: a notification did not come")
            total = sum(count for _, count in pieces)
            what = f"{operation:5} {len(pieces):5} x {pieces[0][1]:9} bytes"
            say(f"{what}: equal, {took * 1e6:8.0f} us, {total / took / 1e9:.2f} GB/s")
            source.raw = (content * (size // len(content) + 1))[:size]
    one.remove_remote_agent("tcpx check 2")
    for agent, registered in held:
        agent.deregister_memory(registered)
    say("PASSED")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tcpx.nixl", description=__doc__)
    parser.add_argument("--check", action="store_true", help="move memory between two agents")
    arguments = parser.parse_args()
    if arguments.check:
        try:
            check()
        except Exception as error:
            raise SystemExit(f"FAILED: {error}; the lines above say why") from None
    else:
        print(plugin_path())


if __name__ == "__main__":
    main()
