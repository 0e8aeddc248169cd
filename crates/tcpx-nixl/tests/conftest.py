"""Has NIXL find the plugin: the file that TCPX_NIXL_PLUGIN names, or that of the installed package."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

plugin = os.environ.get("TCPX_NIXL_PLUGIN")
if plugin:
    # Read when the first agent is made, and by the processes that are started here.
    folder = tempfile.mkdtemp(prefix="tcpx-nixl-")
    os.symlink(os.path.abspath(plugin), os.path.join(folder, "libplugin_TCPX.so"))
    os.environ["NIXL_PLUGIN_DIR"] = folder
# Loopback is what every host has, and nothing of the tests leaves it.
os.environ.setdefault("TCPX_SOCKET_IFNAME", "=lo")

from node import Node, Peer  # noqa: E402


@pytest.fixture
def pair() -> Iterator[tuple[Node, Peer]]:
    """An agent here and one in another process; the other's process must end in order."""
    here, there = Node("here"), Peer("there")
    yield here, there
    assert here.guards_hold()
    assert there.guards_hold()
    here.close()
    assert there.end() == 0
