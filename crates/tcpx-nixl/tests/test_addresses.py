"""Which addresses of an agent are tried, between hosts with several: two network namespaces that these tests make."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from node import Peer

SIZE = 1 << 20
EVERY_INTERFACE = {"TCPX_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Hosts:
    """Hosts `a` and `b`, with one cable between their `eth0`."""

    def __init__(self) -> None:
        self.names = {host: f"tcpx-nixl-{os.getpid()}-{host}" for host in "ab"}
        a, b = self.names.values()
        for name in (a, b):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        for host in "ab":
            self.on(host, "link", "set", "eth0", "up")

    def on(self, host: str, *words: str) -> str:
        return ip("-n", self.names[host], *words)

    def agent(self, host: str, name: str, names: str | None = None, interfaces: str = "") -> Peer:
        variables = EVERY_INTERFACE | {"TCPX_SOCKET_IFNAME": interfaces}
        return Peer(name, variables=variables, namespace=self.names[host], names=names)

    def vanish(self) -> None:
        """`a` has five addresses more, which come before its others; what `b` sends there ends in its card `void`."""
        self.on("b", "link", "add", "void", "type", "veth", "peer", "name", "ends")
        for name in ("void", "ends"):
            self.on("b", "link", "set", name, "addrgenmode", "none", "up")
        for number in range(1, 6):
            self.on("a", "addr", "add", f"10.{number}.0.1/24", "dev", "eth0")
            self.on("b", "route", "add", f"10.{number}.0.0/24", "dev", "void")
            self.on("b", "neigh", "add", f"10.{number}.0.1", "lladdr", "02:00:00:00:00:99", "dev", "void")

    def vanished(self) -> int:
        """Packets that ended there."""
        [card] = json.loads(self.on("b", "-s", "-j", "link", "show", "void"))
        return int(card["stats64"]["tx"]["packets"])

    def remove(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and the program ip for network namespaces")
    try:
        made = Hosts()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield made
    made.remove()


def moves(hosts: Hosts, names: str | None = None) -> None:
    """An agent on `b` writes to memory of one on `a`, and reads from it."""
    owner, other = hosts.agent("a", "owner", names), hosts.agent("b", "other", names)
    remote, local = owner.alloc(SIZE, 1), other.alloc(SIZE, 2)
    other.add(owner.metadata())
    ours, theirs = [(other.address(local), SIZE)], [(owner.address(remote), SIZE)]
    for op in ("WRITE", "READ"):
        assert other.transfer(op, ours, theirs, "owner") == "DONE"
    assert owner.content(remote) == other.content(local)
    for agent in (owner, other):
        assert agent.end() == 0


@pytest.mark.parametrize("also_v4", [False, True])
def test_hosts_that_share_ipv6_alone_reach_each_other(hosts: Hosts, also_v4: bool) -> None:
    hosts.on("a", "addr", "add", "fd77::1/64", "dev", "eth0", "nodad")
    hosts.on("b", "addr", "add", "fd77::2/64", "dev", "eth0", "nodad")
    if also_v4:
        hosts.on("a", "addr", "add", "10.77.0.1/24", "dev", "eth0")
    moves(hosts)


def test_addresses_whose_packets_vanish_hold_nobody_up(hosts: Hosts) -> None:
    """They come before the one that is reached, and are more than time is for one after the other."""
    hosts.on("a", "addr", "add", "10.77.0.9/24", "dev", "eth0")
    hosts.on("b", "addr", "add", "10.77.0.2/24", "dev", "eth0")
    hosts.vanish()
    moves(hosts)
    assert hosts.vanished() > 0


def test_where_an_agent_was_reached_is_tried_first_again(hosts: Hosts) -> None:
    hosts.on("a", "addr", "add", "10.77.0.9/24", "dev", "eth0")
    hosts.on("b", "addr", "add", "10.77.0.2/24", "dev", "eth0")
    hosts.vanish()
    owner, other = hosts.agent("a", "owner"), hosts.agent("b", "other")
    remote, local = owner.alloc(SIZE, 1), other.alloc(SIZE, 2)
    other.add(owner.metadata())
    ours, theirs = [(other.address(local), SIZE)], [(owner.address(remote), SIZE)]
    assert other.transfer("WRITE", ours, theirs, "owner") == "DONE"
    # The connection is lost, and the owner is not.
    owner.stop()
    assert other.transfer("WRITE", ours, theirs, "owner") == "ERR"
    owner.go_on()
    before = hosts.vanished()
    assert before > 0
    assert other.transfer("READ", ours, theirs, "owner") == "DONE"
    assert hosts.vanished() == before
    for agent in (owner, other):
        assert agent.end() == 0


def reached(hosts: Hosts, interfaces: str = "") -> bool:
    """Whether an agent on `b` can write to memory of one on `a`, which has these interfaces to choose from."""
    owner, other = hosts.agent("a", "owner", interfaces=interfaces), hosts.agent("b", "other")
    remote, local = owner.alloc(SIZE, 1), other.alloc(SIZE, 2)
    other.add(owner.metadata())
    ours, theirs = [(other.address(local), SIZE)], [(owner.address(remote), SIZE)]
    state = other.transfer("WRITE", ours, theirs, "owner")
    for agent in (owner, other):
        assert agent.end() == 0
    return state == "DONE"


def test_an_agent_is_reached_by_the_named_interfaces_alone(hosts: Hosts) -> None:
    hosts.on("a", "addr", "add", "10.77.0.1/24", "dev", "eth0")
    hosts.on("b", "addr", "add", "10.77.0.2/24", "dev", "eth0")
    hosts.on("a", "link", "add", "eth1", "type", "veth", "peer", "name", "ends")
    hosts.on("a", "addr", "add", "10.78.0.1/24", "dev", "eth1")
    for name in ("eth1", "ends"):
        hosts.on("a", "link", "set", name, "up")
    for interfaces, expected in (("eth1", False), ("^eth0", False), ("=eth0", True), ("eth1,eth0", True)):
        assert reached(hosts, interfaces) == expected, interfaces


@pytest.mark.parametrize("name", ["docker0", "br-0a1b2c3d4e5f"])
def test_networks_of_containers_are_used_only_if_named(hosts: Hosts, name: str) -> None:
    """Each host has the same, with other machines behind it."""
    hosts.on("a", "link", "set", "eth0", "down")
    hosts.on("a", "link", "set", "eth0", "name", name)
    hosts.on("a", "link", "set", name, "up")
    hosts.on("a", "addr", "add", "10.77.0.1/24", "dev", name)
    hosts.on("b", "addr", "add", "10.77.0.2/24", "dev", "eth0")
    assert not reached(hosts)
    assert reached(hosts, name)


def test_a_host_whose_name_leads_to_itself_is_reached(hosts: Hosts, tmp_path: Path) -> None:
    """Debian gives a host's own name to 127.0.1.1."""
    hosts.on("a", "addr", "add", "10.77.0.1/24", "dev", "eth0")
    hosts.on("b", "addr", "add", "10.77.0.2/24", "dev", "eth0")
    names = tmp_path / "hosts"
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    moves(hosts, str(names))


def test_a_host_that_nobody_can_reach_says_so(
    hosts: Hosts, capfd: pytest.CaptureFixture[str]
) -> None:
    """An address of a link means nothing at a peer that does not know the link's name."""
    for number, host in enumerate("ab", 1):
        hosts.on(host, "addr", "add", f"fe80::{number}/64", "dev", "eth0", "nodad")
    owner, other = hosts.agent("a", "owner"), hosts.agent("b", "other")
    remote, local = owner.alloc(SIZE, 1), other.alloc(SIZE, 2)
    other.add(owner.metadata())
    ours, theirs = [(other.address(local), SIZE)], [(owner.address(remote), SIZE)]
    assert other.transfer("WRITE", ours, theirs, "owner") != "DONE"
    for agent in (owner, other):
        assert agent.end() == 0
    # Beside the address that the system gave the card by itself.
    assert "this host alone can reach its agents: fe80::" in capfd.readouterr().err
