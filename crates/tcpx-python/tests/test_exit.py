"""Interpreters that end while the peer is using their memory, or while threads of theirs wait."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from conftest import PATIENCE, run_python

import tcpx

# Which moment of the end the peer meets is chance, so it is tried some times.
EXITS = int(os.environ.get("TCPX_EXITS", "6"))
BYTES, PIECE = 64 << 20, 1 << 18

OWNER = """
import sys, threading, tcpx
{before}
def main():
    endpoint = tcpx.Endpoint("127.0.0.1:0", insecure=True)
    print(endpoint.address[1], flush=True)
    connection = endpoint.accept().wait()
    window = connection.expose({memory})
    {during}
    print(window.key.hex(), flush=True)
    # The peer's first get has ended: the others are under way.
    connection.notification().wait()
main()
"""

WAITER = "threading.Thread(target=lambda: connection.recv(bytearray(8)).wait(), daemon=True).start()"

# Kept until the interpreter takes its modules apart.
PENDING = "global held; held = [connection.recv(bytearray(8), tag=tag) for tag in range(50)]"
# A child that ends as a program does, beside its parent's threads.
FORKED = "import multiprocessing; child = multiprocessing.get_context('fork').Process(target=len, args=('',)); child.start(); child.join()"


@pytest.mark.parametrize(
    ("before", "memory", "during"),
    [
        # What ends late, and by Python code, gives the interpreter time for what it was asked.
        ("import asyncio; asyncio.new_event_loop()", f"bytearray({BYTES})", ""),
        (
            "import asyncio, concurrent.futures, numpy; asyncio.new_event_loop()",
            f"numpy.zeros({BYTES}, dtype=numpy.uint8)",
            "",
        ),
        ("", f"bytearray({BYTES})", WAITER),
        ("", f"bytearray({BYTES})", PENDING),
        ("", f"bytearray({BYTES})", FORKED),
    ],
    ids=["bytearray", "numpy", "thread", "pending", "child"],
)
def test_an_owner_that_ends_under_gets_ends_in_order(before: str, memory: str, during: str) -> None:
    code = OWNER.format(before=before, memory=memory, during=during)
    for _ in range(EXITS):
        owner = run_python(code)
        assert owner.stdout is not None and owner.stderr is not None
        port = int(owner.stdout.readline())
        connection = tcpx.connect(f"127.0.0.1:{port}", insecure=True, timeout=PATIENCE).wait()
        key = bytes.fromhex(owner.stdout.readline())
        pieces = [connection.get(bytearray(PIECE), key, at) for at in range(0, BYTES, PIECE)]
        pieces[0].wait(PATIENCE)
        told = connection.notify(b"under way")
        said, errors = owner.communicate(timeout=PATIENCE)
        assert (owner.returncode, said, errors) == (0, "", "")
        for piece in [*pieces, told]:
            try:
                piece.wait(PATIENCE)
            except tcpx.Error:
                pass


def test_threads_that_nobody_waits_for_end_with_the_interpreter() -> None:
    code = Path(__file__).with_name("daemon_threads.py").read_text()
    for _ in range(EXITS):
        with run_python(code) as program:
            said, errors = program.communicate(timeout=PATIENCE)
        assert (program.returncode, said, errors) == (0, "", "")


CLOSING = """
import sys, tcpx
connection = tcpx.connect(sys.argv[1]).wait()
source = bytearray(1 << 20)
held = connection.send(source, tag=1)
{how}
"""


def accept_all(server: tcpx.Endpoint) -> None:
    """Whoever comes, also who goes again before the connection is there."""
    accepted = []
    while not server.closed:
        try:
            accepted.append(server.accept(timeout=0.1))
        except tcpx.Error:
            pass


@pytest.mark.parametrize(
    "how", ["connection.aclose(600)", "dialling = tcpx.connect(sys.argv[1])._opening()"], ids=["closes", "opens"]
)
def test_an_interpreter_ends_while_a_connection_opens_or_closes(how: str) -> None:
    """A thread of its own is at it, which nobody waits for."""
    with tcpx.Endpoint("127.0.0.1:0", timeout=PATIENCE) as server:
        host, port = server.address
        accepting = threading.Thread(target=accept_all, args=(server,))
        accepting.start()
        for _ in range(EXITS):
            with run_python(CLOSING.format(how=how), f"{host}:{port}", TCPX_KEY=server.key) as program:
                said, errors = program.communicate(timeout=PATIENCE)
            assert (program.returncode, said, errors) == (0, "", "")
    accepting.join()
