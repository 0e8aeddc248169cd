"""Fixtures: a pair of connections in this process, and Python programs beside it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def run_python(
    code: str, *arguments: str, before: Sequence[str] = (), **environment: str
) -> subprocess.Popen[str]:
    """Another interpreter that runs `code`, as the command `before` has it."""
    return subprocess.Popen(
        [*before, sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def ipv6_alone(tmp_path: Path) -> list[str]:
    """What runs a program on a host that has no IPv4 address, and whose name means its IPv6 address."""
    names = tmp_path / "hosts"
    names.write_text(f"fd77::1 {socket.gethostname()}\n")
    script = (
        "ip link set lo up; ip addr del 127.0.0.1/8 dev lo; ip addr add fd77::1/128 dev lo nodad;"
        'mount --bind "$0" /etc/hosts; exec "$@"'
    )
    command = ["unshare", "--net", "--mount", "sh", "-ec", script, str(names)]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace with IPv6 here: {getattr(error, 'stderr', error)}")
    return command
