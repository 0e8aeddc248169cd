"""Fixtures: a pair of connections in this process, and Python programs beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import tcpx

# Long enough for a machine whose cores are all busy; nothing here waits for it when all is well.
PATIENCE = 120.0


def connect_pair() -> tuple[tcpx.Connection, tcpx.Connection]:
    """Both ends of a connection over loopback."""
    with tcpx.Endpoint("127.0.0.1:0", timeout=PATIENCE) as server:
        accepted: list[tcpx.Connection] = []
        thread = threading.Thread(target=lambda: accepted.append(server.accept(timeout=PATIENCE)))
        thread.start()
        client = tcpx.connect(server.pairing(), timeout=PATIENCE).wait()
        thread.join()
    return client, accepted[0]


@pytest.fixture
def pair() -> Iterator[tuple[tcpx.Connection, tcpx.Connection]]:
    client, server = connect_pair()
    yield client, server
    for connection in (client, server):
        if not connection.closed:
            # The other end may have gone in the test; its end is not what is tested then.
            try:
                connection.close(1)
            except tcpx.Error:
                pass


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Another interpreter that runs `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
