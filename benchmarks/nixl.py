"""The NIXL backend TCPX beside UCX of the same wheel: two processes, host memory, in turns.

    python benchmarks/nixl.py [--plugin target/release/libplugin_TCPX.so] [--rounds 3] [--json FILE]

Needs a NIXL wheel (`pip install --no-deps nixl-cu12 numpy`). Each round runs every case with each backend
in a pair of processes of its own; the figure is the median of the rounds' medians. `ucx tcp` is UCX as
it is between hosts without RDMA (UCX_TLS=tcp); `ucx` may copy within one host (shared memory, CMA), which
no two hosts can.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import types
from multiprocessing import get_context
from pathlib import Path
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
PAIRS = {
    "tcpx": ("TCPX", {}),
    "ucx tcp": ("UCX", {"UCX_TLS": "tcp"}),
    "ucx": ("UCX", {}),
}
# name, pieces, bytes of each, repeats, unit
LISTS = [
    ("1 MiB", 1, MIB, 60),
    ("16 MiB", 1, 16 * MIB, 20),
    ("256 MiB", 1, 256 * MIB, 5),
    ("Llama-8B, 32,768 x 32 KiB", 32_768, 32 * KIB, 3),
    ("70B TP8, 81,920 x 4 KiB", 81_920, 4 * KIB, 3),
    ("MLA, 4,096 x 72 KiB", 4_096, 72 * KIB, 3),
]
LIMIT = 300.0


def nixl() -> Any:
    try:
        import torch  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType("torch")
        stand_in.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
        sys.modules["torch"] = stand_in
    for name in ("nixl_cu12", "nixl_cu13"):
        try:
            return __import__(f"{name}._api", fromlist=["_api"])
        except ImportError:
            continue
    raise SystemExit("no NIXL wheel is installed: pip install --no-deps nixl-cu12 numpy")


def agent(name: str, backend: str, size: int) -> tuple[Any, Any, Any]:
    import numpy as np

    api = nixl()
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[backend]))
    memory = np.zeros(size, dtype=np.uint8)
    memory[:] = np.arange(size, dtype=np.uint8)
    registered = agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    return agent, memory, registered


def wait_notif(agent: Any) -> None:
    until = time.monotonic() + LIMIT
    while not agent.get_new_notifs():
        if time.monotonic() > until:
            raise SystemExit("a notification did not come")


def finish(agent: Any, handle: Any, state: str) -> None:
    until = time.monotonic() + LIMIT
    while state != "DONE":
        if state == "ERR" or time.monotonic() > until:
            raise SystemExit(f"a transfer ended with {state}")
        state = agent.check_xfer_state(handle)


def target(pipe: Any, backend: str, size: int, rounds: int) -> None:
    """The other side: memory, and the answers of the ping-pong."""
    agent_, memory, registered = agent("target", backend, size)
    pipe.send((agent_.get_agent_metadata(), memory.ctypes.data))
    metadata, address = pipe.recv()
    agent_.add_remote_agent(metadata)
    local = agent_.get_xfer_descs([(memory.ctypes.data, 4096, 0)], "DRAM")
    remote = agent_.get_xfer_descs([(address, 4096, 0)], "DRAM")
    handle = agent_.initialize_xfer("WRITE", local, remote, "initiator", b"pong")
    pipe.send("ready")
    for _ in range(rounds):
        wait_notif(agent_)
        finish(agent_, handle, agent_.transfer(handle, b"pong"))
    agent_.release_xfer_handle(handle)
    pipe.recv()
    agent_.remove_remote_agent("initiator")
    agent_.deregister_memory(registered)


def measure(backend: str, small: bool) -> dict[str, float]:
    """All cases with one backend: seconds, by case."""
    import numpy as np

    rounds = 400
    lists = [] if small else LISTS
    size = max([MIB, *(count * piece for _, count, piece, _ in lists)])
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, backend, size, rounds))
    process.start()
    us, memory, registered = agent("initiator", backend, size)
    metadata, address = pipe.recv()
    us.add_remote_agent(metadata)
    pipe.send((us.get_agent_metadata(), memory.ctypes.data))
    pipe.recv()
    times: dict[str, float] = {}

    # 4 KiB with a notification, back and forth; then alone.
    local = us.get_xfer_descs([(memory.ctypes.data, 4096, 0)], "DRAM")
    remote = us.get_xfer_descs([(address, 4096, 0)], "DRAM")
    handle = us.initialize_xfer("WRITE", local, remote, "target", b"ping")
    halves = []
    for _ in range(rounds):
        started = time.perf_counter()
        finish(us, handle, us.transfer(handle, b"ping"))
        wait_notif(us)
        halves.append((time.perf_counter() - started) / 2)
    times["notification behind 4 KiB, half round trip"] = statistics.median(halves[50:])
    us.release_xfer_handle(handle)
    for op in ("WRITE", "READ"):
        handle = us.initialize_xfer(op, local, remote, "target")
        took = []
        for _ in range(1000):
            started = time.perf_counter()
            finish(us, handle, us.transfer(handle))
            took.append(time.perf_counter() - started)
        times[f"4 KiB {op}, post to DONE"] = statistics.median(took[100:])
        us.release_xfer_handle(handle)

    rng = np.random.default_rng(7)
    for name, count, piece, repeats in lists:

        def listed(start: int) -> Any:
            at = start + np.arange(count, dtype=np.uint64) * np.uint64(piece)
            return np.stack([at, np.full(count, piece, np.uint64), np.zeros(count, np.uint64)], axis=1)

        ours = us.prep_xfer_dlist("NIXL_INIT_AGENT", listed(memory.ctypes.data), "DRAM")
        others = us.prep_xfer_dlist("target", listed(address), "DRAM")
        order = [rng.permutation(count).astype(np.int32) for _ in range(2)]
        for op in ("WRITE", "READ"):
            handle = us.make_prepped_xfer(op, ours, order[0], others, order[1])
            took, posts = [], []
            for _ in range(repeats + 1):
                started = time.perf_counter()
                state = us.transfer(handle)
                posts.append(time.perf_counter() - started)
                finish(us, handle, state)
                took.append(time.perf_counter() - started)
            times[f"{name} {op}"] = statistics.median(took[1:])
            if count == 32_768:
                times[f"posting 32,768 pieces {op}"] = statistics.median(posts[1:])
            us.release_xfer_handle(handle)
        us.release_dlist_handle(ours)
        us.release_dlist_handle(others)
    pipe.send("end")
    process.join(60)
    us.remove_remote_agent("target")
    us.deregister_memory(registered)
    return times


def install(plugin: Path) -> None:
    """Puts the plugin beside those of the wheel, as a link."""
    import importlib.util

    for name in ("nixl_cu12", "nixl_cu13"):
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            folder = Path(spec.origin).parent.parent / f".{name}.mesonpy.libs" / "plugins"
            link = folder / "libplugin_TCPX.so"
            link.unlink(missing_ok=True)
            link.symlink_to(plugin.resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plugin", type=Path, help="link this file beside the wheel's plugins first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", default=",".join(PAIRS), help=f"of {', '.join(PAIRS)}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="only the cases of 4 KiB")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print("RESULT " + json.dumps(measure(PAIRS[arguments.one][0], arguments.small)))
        return
    if arguments.plugin:
        install(arguments.plugin)
    pairs = arguments.pairs.split(",")
    found: dict[str, list[dict[str, float]]] = {pair: [] for pair in pairs}
    for _ in range(arguments.rounds):
        for pair in pairs:
            variables = {**os.environ, "TCPX_SOCKET_IFNAME": "=lo", **PAIRS[pair][1]}
            done = subprocess.run(
                [sys.executable, __file__, "--one", pair, *(["--small"] if arguments.small else [])],
                env=variables,
                capture_output=True,
                text=True,
                check=False,
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                print(f"{pair}: {done.stderr[-2000:]}", file=sys.stderr)
                continue
            found[pair].append(json.loads(lines[-1].removeprefix("RESULT ")))
    sizes = {name: count * piece for name, count, piece, _ in LISTS}
    cases = next((rounds[0] for rounds in found.values() if rounds), {})
    print("| case | " + " | ".join(pairs) + " |")
    print("|---" * (len(pairs) + 1) + "|")
    for case in cases:
        size = sizes.get(case.rsplit(" ", 1)[0])
        cells = []
        for pair in pairs:
            times = [times[case] for times in found[pair] if case in times]
            if not times:
                cells.append("-")
            elif size:
                cells.append(f"{size / statistics.median(times) / 1e9:.2f} GB/s")
            else:
                cells.append(f"{statistics.median(times) * 1e6:.0f} us")
        print(f"| {case} | " + " | ".join(cells) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
