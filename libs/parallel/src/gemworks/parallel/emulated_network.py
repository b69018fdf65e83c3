"""The three network tiers on one machine: hosts as network namespaces, zones as bridges, links limited by `tc`.

    zone 0                      zone 1
    host 0 - ranks 0, 1 --+     +-- host 2 - ranks 4, 5
                        bridge -- bridge
    host 1 - ranks 2, 3 --+  ^  +-- host 3 - ranks 6, 7
                             |
       host links: `host_mbit`        the link between zones: `cross_mbit`

Ranks of one host talk over its loopback, unlimited. Needs root and iproute2. By hand:

    python -m gemworks.parallel.emulated_network up
    ip netns exec gw-host0 <command>
    python -m gemworks.parallel.emulated_network status
    python -m gemworks.parallel.emulated_network down

Framing: the kernel counts bytes with headers. On a veth a packet carries 14 bytes of Ethernet, 20 of IPv4 and 32 of TCP
(with time stamps), on the loopback 52 without Ethernet; IPv6 is off, the MTU is 9000, and large segments are counted
once. `TierCounters` takes these headers off, packet by packet, so what is left is what the processes wrote.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gemworks.parallel.cluster import COLLECTIVES, ClusterSpec, Gpu, Link, Rate, Tier

ETHERNET_HEADER, TCP_HEADERS = 14, 20 + 32
INTERFACE = "eth0"
_CLONE_NEWNET = 0x40000000

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TierCounters:
    """Bytes sent over every tier since the links came up, headers taken off, summed over all hosts.

    Attributes:
        nvlink: between processes of one host (loopback).
        zone: over host links, without what goes on to another zone.
        cross_zone: over links between zones.
        framing_share: headers / all bytes on the host links and between zones.
    """

    nvlink: float
    zone: float
    cross_zone: float
    framing_share: float

    def minus(self, before: TierCounters, times: int = 1) -> dict[Tier, float]:
        """Bytes since `before`, divided by `times`."""
        return {
            "nvlink": (self.nvlink - before.nvlink) / times,
            "zone": (self.zone - before.zone) / times,
            "cross_zone": (self.cross_zone - before.cross_zone) / times,
        }


@dataclass(frozen=True, kw_only=True)
class EmulatedNetwork:
    """Hosts in zones on this machine; a context manager that sets up and takes down.

    Attributes:
        num_zones, hosts_per_zone, ranks_per_host: the shape.
        host_mbit: of a host's link to its zone, each way.
        cross_mbit: of the link between a zone and the others, each way.
        prefix: of the namespaces' names.
    """

    num_zones: int = 2
    hosts_per_zone: int = 2
    ranks_per_host: int = 2
    host_mbit: float = 400.0
    cross_mbit: float = 100.0
    prefix: str = "gw-"

    @property
    def num_hosts(self) -> int:
        return self.num_zones * self.hosts_per_zone

    @property
    def world_size(self) -> int:
        return self.num_hosts * self.ranks_per_host

    def host(self, index: int) -> str:
        """The namespace of a host."""
        return f"{self.prefix}host{index}"

    def host_of_rank(self, rank: int) -> str:
        """The namespace that a rank runs in."""
        return self.host(rank // self.ranks_per_host)

    def cluster(self) -> ClusterSpec:
        """The shape as a `ClusterSpec`; rates are the limits themselves, to be replaced by measured ones."""
        cpu = 2e9  # bytes/s; a guess that nothing but the loopback's and the host's figures use before measuring
        speed: dict[Tier, float] = {
            "nvlink": cpu,
            "zone": self.host_mbit * 1e6 / 8 / self.ranks_per_host,
            "cross_zone": self.cross_mbit * 1e6 / 8 / self.ranks_per_host / self.hosts_per_zone,
        }
        link = Link(
            up_bytes_per_s=cpu,
            down_bytes_per_s=cpu,
            duplex_bytes_per_s=cpu,
            latency_us=50.0,
            copy_engines_up=0,
            copy_engines_down=0,
        )
        spec = ClusterSpec(
            name="emulated",
            gpus_per_domain=self.ranks_per_host,
            domains_per_zone=self.hosts_per_zone,
            num_zones=self.num_zones,
            oversubscription=max(1.0, self.hosts_per_zone * self.host_mbit / self.cross_mbit),
            gpu=Gpu(name="process", hbm_bytes=2**31, hbm_bytes_per_s=cpu, num_sms=1, peak_flops_per_s={"bf16": 1e10}),
            links={"host": link},
            tiers={t: {c: Rate(bytes_per_s=w, latency_us=100.0) for c in COLLECTIVES} for t, w in speed.items()},
            sources={"": "network namespaces on one machine; rates are the configured limits"},
        )
        return spec

    def __enter__(self) -> EmulatedNetwork:
        self.up()
        return self

    def __exit__(self, *exc: object) -> None:
        self.down()

    def up(self) -> None:
        """Make namespaces, bridges, links and limits.

        Raises:
            ValueError: not possible here; says why.
        """
        reason = why_not()
        if reason:
            raise ValueError(f"emulated network: {reason}")
        self.down()
        try:
            for z in range(self.num_zones):
                self._zone(z)
            for h in range(self.num_hosts):
                self._host(h)
            # Zone 0 is where the others meet: two zones have one link between them.
            for z in range(1, self.num_zones):
                self._cross(z)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Delete everything that `up` made; quiet if it is not there. Links end with their namespaces."""
        for name in self.namespaces():
            if Path("/run/netns", name).exists():
                _run("ip", "netns", "del", name)

    def namespaces(self) -> list[str]:
        """Zones, then hosts."""
        return [f"{self.prefix}zone{z}" for z in range(self.num_zones)] + [self.host(h) for h in range(self.num_hosts)]

    def cut(self, host: int) -> None:
        """Pull a host's cable."""
        zone = host // self.hosts_per_zone
        _run("ip", "-n", f"{self.prefix}zone{zone}", "link", "set", f"port{host}", "down")

    def counters(self) -> TierCounters:
        """Read the interfaces' counters, in their namespaces."""
        local = hosts = cross = headers = total = 0.0
        for h in range(self.num_hosts):
            found = in_namespace(self.host(h), _interfaces)
            nbytes, packets = found["lo"]
            local += nbytes - packets * TCP_HEADERS
            nbytes, packets = found[INTERFACE]
            hosts += nbytes - packets * (ETHERNET_HEADER + TCP_HEADERS)
            headers += packets * (ETHERNET_HEADER + TCP_HEADERS)
            total += nbytes
        for z in range(1, self.num_zones):
            for zone, port in ((z, "uplink"), (0, f"zone{z}")):
                nbytes, packets = in_namespace(f"{self.prefix}zone{zone}", _interfaces)[port]
                cross += nbytes - packets * (ETHERNET_HEADER + TCP_HEADERS)
                headers += packets * (ETHERNET_HEADER + TCP_HEADERS)
                total += nbytes
        return TierCounters(
            nvlink=local, zone=hosts - cross, cross_zone=cross, framing_share=headers / total if total else 0.0
        )

    def _zone(self, z: int) -> None:
        name = f"{self.prefix}zone{z}"
        _run("ip", "netns", "add", name)
        _no_ipv6(name)
        _run("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", name, "link", "set", "bridge", "mtu", "9000", "up")

    def _host(self, h: int) -> None:
        name, zone = self.host(h), f"{self.prefix}zone{h // self.hosts_per_zone}"
        _run("ip", "netns", "add", name)
        _no_ipv6(name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        self._link(name, INTERFACE, zone, f"port{h}", self.host_mbit)
        _run("ip", "-n", zone, "link", "set", f"port{h}", "master", "bridge")
        _run("ip", "-n", name, "addr", "add", f"10.77.0.{h + 1}/24", "dev", INTERFACE)

    def _cross(self, z: int) -> None:
        a, b = f"{self.prefix}zone{z}", f"{self.prefix}zone0"
        self._link(a, "uplink", b, f"zone{z}", self.cross_mbit)
        _run("ip", "-n", a, "link", "set", "uplink", "master", "bridge")
        _run("ip", "-n", b, "link", "set", f"zone{z}", "master", "bridge")

    def _link(self, a: str, port_a: str, b: str, port_b: str, mbit: float) -> None:
        _run("ip", "-n", a, "link", "add", port_a, "type", "veth", "peer", "name", port_b, "netns", b)
        for name, port in ((a, port_a), (b, port_b)):
            _run("ip", "-n", name, "link", "set", port, "mtu", "9000", "up")
            # A bucket that holds a 64 KiB segment whole, and a queue deep enough that TCP is never dropped.
            limit = ["tbf", "rate", f"{mbit:g}mbit", "burst", "80kb", "limit", "64mb"]
            _run("tc", "-n", name, "qdisc", "add", "dev", port, "root", *limit)


def why_not() -> str:
    """Why this machine cannot emulate a network; "" if it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    probe = subprocess.run(["ip", "netns", "add", "gw-probe"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"this kernel or container refuses network namespaces: {probe.stderr.strip()}"
    limit = ["tc", "-n", "gw-probe", "qdisc", "add", "dev", "lo", "root", "tbf"]
    try:
        done = subprocess.run(
            [*limit, "rate", "1mbit", "burst", "64kb", "limit", "1mb"], capture_output=True, text=True, check=False
        )
    finally:
        _run("ip", "netns", "del", "gw-probe")
    return f"this kernel has no tbf queue: {done.stderr.strip()}" if done.returncode else ""


def enter_namespace(name: str) -> None:
    """Move the calling thread, and the threads that it starts from now on, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")
    finally:
        os.close(fd)


def in_namespace(name: str, run: Callable[[], T]) -> T:
    """Call `run` in a namespace, on a thread of its own."""
    box: list[T] = []
    failed: list[BaseException] = []

    def body() -> None:
        try:
            enter_namespace(name)
            box.append(run())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return box[0]


def _interfaces() -> dict[str, tuple[int, int]]:
    """Interface -> (bytes, packets) sent, of this thread's namespace."""
    found: dict[str, tuple[int, int]] = {}
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        columns = numbers.split()
        found[name.strip()] = (int(columns[8]), int(columns[9]))
    return found


def _no_ipv6(name: str) -> None:
    # Neighbour discovery would be counted with the payload.
    path = "/proc/sys/net/ipv6/conf"
    off = f"for d in all default; do [ -e {path}/$d ] && echo 1 > {path}/$d/disable_ipv6; done; true"
    _run("ip", "netns", "exec", name, "sh", "-c", off)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    """`up`, `down`, `status` of the default network."""
    parser = argparse.ArgumentParser(prog="python -m gemworks.parallel.emulated_network")
    parser.add_argument("action", choices=["up", "down", "status"])
    parser.add_argument("--host-mbit", type=float, default=400.0)
    parser.add_argument("--cross-mbit", type=float, default=100.0)
    args = parser.parse_args(argv)
    network = EmulatedNetwork(host_mbit=args.host_mbit, cross_mbit=args.cross_mbit)
    reason = why_not()
    if reason:
        parser.error(reason)
    if args.action == "up":
        network.up()
    elif args.action == "down":
        network.down()
    for name in network.namespaces():
        there = Path("/run/netns", name).exists()
        print(f"{name:10} {'up' if there else '-'}")
        if there and args.action == "status":
            print(_run("tc", "-s", "-n", name, "qdisc", "show"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
