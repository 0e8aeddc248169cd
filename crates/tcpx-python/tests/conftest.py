"""Fixtures: a pair of connections in this process, and Python programs beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import tcpx

# Long enough for a machine whose cores are all busy; nothing here waits for it when all is well.
PATIENCE = 120.0


def open_both(
    server: tcpx.Endpoint, line: str | None = None, **settings
) -> tuple[tcpx.Connection, tcpx.Connection]:
    """Both ends of a connection to `server`; raises as connecting does."""
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(server.accept, PATIENCE)
        client = tcpx.connect(line or server.pairing(), timeout=PATIENCE, **settings).wait()
        return client, accepted.result()


def connect_pair(
    progress: str = "background", encrypt: bool = False, limits: dict[str, int] | None = None
) -> tuple[tcpx.Connection, tcpx.Connection]:
    """Both ends of a connection over loopback; `progress` is that of the client."""
    with tcpx.Endpoint("127.0.0.1:0", encrypt=encrypt, timeout=PATIENCE, limits=limits) as server:
        return open_both(server, encrypt=encrypt, progress=progress, limits=limits)


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
