"""One account of who moves how many bytes over which link, and when.

Everything that travels shares a few links, so one ledger decides. A *link* has a direction as seen from the GPU: `up`
leaves it, `down` enters it. Moving a byte over a link also spends a byte of the link's duplex total and a byte of
device-memory traffic; each of these is a *resource* with a capacity in bytes per second.

Two uses:

- `reserve` books bytes in an interval and refuses what would oversubscribe a resource at any instant;
- `predict` (module `timeline`) plays a step and says how much of the traffic is exposed.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemworks.netmem import cluster_file
from gemworks.netmem.checks import check_all, check_kind, check_number
from gemworks.netmem.errors import OversubscribedError

if TYPE_CHECKING:
    from gemworks.netmem.timeline import Prediction, Segment, Transfer

HBM = "hbm"
# Relative slack of every capacity test: sums of floats that are equal on paper differ in the last bits.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Link:
    """One direction of one link of one GPU.

    Args:
        name: `host.up`, `host.down`, `nvlink.up`, `nvlink.down`, `nic.up`, `nic.down`; or a name of your own.
        bytes_per_s: rate of this direction alone.
        latency_s: time before the first byte of a transfer arrives.
        num_copy_engines: copy engines that can drive it at once; they serve in order of arrival and ignore stream
            priority. 0: nothing queues (SMs or the NIC's own DMA drive the link).
        resources: what a byte over this link also spends, besides the link itself.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    num_copy_engines: int = 0
    resources: tuple[str, ...] = (HBM,)

    def __post_init__(self) -> None:
        check_kind("name", self.name, str, "'host.up' or the like")
        check_number(f"bytes_per_s of link {self.name!r}", self.bytes_per_s, above=True, fix="leave an absent link out")
        check_number(f"latency_s of link {self.name!r}", self.latency_s)
        check_number(f"num_copy_engines of link {self.name!r}", self.num_copy_engines, whole=True)
        check_all(f"resources of link {self.name!r}", self.resources, str)

    @property
    def path(self) -> tuple[str, ...]:
        """Every resource that a byte over this link spends."""
        return (self.name, *self.resources)


@dataclass(frozen=True)
class Reservation:
    """Bytes booked on a link at a constant rate over `[start_s, end_s)`."""

    id: int
    link: str
    num_bytes: float
    start_s: float
    end_s: float
    owner: str

    @property
    def bytes_per_s(self) -> float:
        """The constant rate."""
        return self.num_bytes / (self.end_s - self.start_s)


class BandwidthLedger:
    """Links with their rates, the reservations on them, and what a step would expose.

    Args:
        links: the directed links.
        hbm_bytes_per_s: device-memory traffic (read + write) that the GPU sustains.
        shared: further shared capacities by resource name, such as `host.duplex`.

    >>> ledger = BandwidthLedger([Link("host.up", 50e9)], hbm_bytes_per_s=4e12)
    >>> booked = ledger.reserve("host.up", 40e9, start_s=0.0, end_s=1.0, owner="offload")
    >>> round(ledger.free_bytes("host.up", 0.0, 2.0) / 1e9)
    60
    >>> ledger.reserve("host.up", 20e9, start_s=0.5, end_s=1.5, owner="stash")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    gemworks.netmem.errors.OversubscribedError: host.up: 60.00 GB/s asked between 0.5 s and 1 s, ...
    """

    def __init__(
        self, links: Iterable[Link], hbm_bytes_per_s: float, shared: Mapping[str, float] | None = None
    ) -> None:
        links = check_all("links", links, Link)
        self.links = {link.name: link for link in links}
        if len(self.links) != len(links):
            raise ValueError(f"links: expected different names, got {[link.name for link in links]}")
        check_number("hbm_bytes_per_s", hbm_bytes_per_s, above=True)
        self.capacity: dict[str, float] = {HBM: float(hbm_bytes_per_s), **dict(shared or {})}
        for link in self.links.values():
            if link.name in self.capacity:
                raise ValueError(f"links: {link.name!r} is also the name of a shared resource; rename one")
            for resource in link.resources:
                if resource not in self.capacity:
                    raise ValueError(
                        f"link {link.name!r}: resource {resource!r} has no capacity, expected one of "
                        f"{sorted(self.capacity)}; add it to shared"
                    )
        self.capacity |= {name: link.bytes_per_s for name, link in self.links.items()}
        for name, rate in self.capacity.items():
            check_number(f"capacity of {name!r}", rate, above=True)
        self._reservations: dict[int, Reservation] = {}
        self._ids = itertools.count()
        self._file: dict[str, Any] | None = None

    # -- the cluster file ----------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BandwidthLedger:
        """A ledger with the links of a parsed cluster file (schema: README of gemworks-parallel)."""
        data = cluster_file.check(copy.deepcopy(data))
        links: list[Link] = []
        shared: dict[str, float] = {}
        for name, figures in data["links"].items():
            shared[f"{name}.duplex"] = figures["duplex_bytes_per_s"]
            links += [
                Link(
                    name=f"{name}.{way}",
                    bytes_per_s=figures[f"{way}_bytes_per_s"],
                    latency_s=figures["latency_us"] * 1e-6,
                    num_copy_engines=figures[f"copy_engines_{way}"],
                    resources=(f"{name}.duplex", HBM),
                )
                for way in ("up", "down")
            ]
        ledger = cls(links, hbm_bytes_per_s=data["gpu"]["hbm_bytes_per_s"], shared=shared)
        ledger._file = data
        return ledger

    @classmethod
    def from_toml(cls, path: str | Path) -> BandwidthLedger:
        """A ledger with the links of a cluster file."""
        return cls.from_dict(cluster_file.read(path))

    def to_dict(self) -> dict[str, Any]:
        """The cluster file this ledger was made from, kept as it was read.

        Raises:
            ValueError: the ledger was built from bare links, so shape, GPU and tiers are unknown.
        """
        if self._file is None:
            raise ValueError(
                "to_dict: this ledger was built from bare links and knows no cluster; start from from_toml() or "
                "measure()"
            )
        return copy.deepcopy(self._file)

    def to_toml(self, path: str | Path) -> None:
        """Write the cluster file; reading it again gives an equal ledger."""
        cluster_file.write(self.to_dict(), path)

    # -- reservations --------------------------------------------------------------------------------------------------

    def link(self, name: str) -> Link:
        """The link of that name, or a ValueError that lists the names."""
        if name not in self.links:
            raise ValueError(f"link: got {name!r}, expected one of {sorted(self.links)}")
        return self.links[name]

    @property
    def reservations(self) -> tuple[Reservation, ...]:
        """Every reservation that was not released."""
        return tuple(self._reservations.values())

    def _on(self, resource: str) -> list[Reservation]:
        return [r for r in self._reservations.values() if resource in self.links[r.link].path]

    def _pieces(self, resources: Iterable[str], start_s: float, end_s: float) -> list[tuple[float, float, float]]:
        """(start, end, free rate) over the interval: the least free capacity of the resources, piecewise constant."""
        booked = {resource: self._on(resource) for resource in resources}
        edges = {start_s, end_s}
        for reservations in booked.values():
            for r in reservations:
                edges |= {t for t in (r.start_s, r.end_s) if start_s < t < end_s}
        times = sorted(edges)
        pieces = []
        for t0, t1 in itertools.pairwise(times):
            free = min(
                self.capacity[resource] - sum(r.bytes_per_s for r in reservations if r.start_s <= t0 and r.end_s >= t1)
                for resource, reservations in booked.items()
            )
            pieces.append((t0, t1, free))
        return pieces

    def reserve(self, link: str, num_bytes: float, *, start_s: float, end_s: float, owner: str) -> Reservation:
        """Book bytes on a link at a constant rate.

        Args:
            link: name of the link.
            num_bytes: bytes to move within the interval.
            start_s: begin of the interval, seconds.
            end_s: end of the interval, seconds.
            owner: who moves them; named in refusals.

        Raises:
            OversubscribedError: some resource of the link would carry more than its capacity at some instant.
            ValueError: unknown link, empty interval, negative bytes.
        """
        path = self.link(link).path
        check_number("start_s", start_s, -math.inf)
        check_number("end_s", end_s, start_s, above=True)
        check_number("num_bytes", num_bytes)
        rate = num_bytes / (end_s - start_s)
        for resource in path:
            capacity = self.capacity[resource]
            for t0, t1, free in self._pieces([resource], start_s, end_s):
                if rate > free + TOLERANCE * capacity:
                    holders = sorted({r.owner for r in self._on(resource) if r.start_s < t1 and r.end_s > t0})
                    raise OversubscribedError(
                        f"{resource}: {(capacity - free + rate) / 1e9:.2f} GB/s asked between {t0:g} s and {t1:g} s, "
                        f"capacity {capacity / 1e9:.2f} GB/s; "
                        f"holders: {', '.join(holders) or 'none'}; start later, take longer, or use fit()"
                    )
        reservation = Reservation(next(self._ids), link, num_bytes, start_s, end_s, owner)
        self._reservations[reservation.id] = reservation
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Give a reservation back.

        Raises:
            ValueError: it is not (or no longer) booked here.
        """
        check_kind("reservation", reservation, Reservation, "what reserve() and fit() return")
        if self._reservations.pop(reservation.id, None) is None:
            raise ValueError(
                f"reservation {reservation.id} of {reservation.owner!r} is not booked here; it was released before"
            )

    def free_bytes(self, link: str, start_s: float, end_s: float) -> float:
        """Bytes that can still be booked on a link in an interval: the integral of what its tightest resource has
        left.
        """
        check_number("start_s", start_s, -math.inf)
        check_number("end_s", end_s, -math.inf)
        if end_s <= start_s:
            return 0.0
        return sum(max(0.0, free) * (t1 - t0) for t0, t1, free in self._pieces(self.link(link).path, start_s, end_s))

    def fit(
        self, link: str, num_bytes: float, *, start_s: float, owner: str, deadline_s: float | None = None
    ) -> tuple[Reservation, ...]:
        """Book bytes as early as the free capacity allows, in as many pieces as that takes.

        Returns:
            The reservations, in time order; the last one's `end_s` is when the transfer is done. Empty for 0 bytes.

        Raises:
            OversubscribedError: they do not fit before `deadline_s`; nothing stays booked.
        """
        path = self.link(link).path
        check_number("num_bytes", num_bytes)
        check_number("start_s", start_s, -math.inf)
        if deadline_s is not None:
            check_number("deadline_s", deadline_s, -math.inf)
        ends = [r.end_s for resource in path for r in self._on(resource)]
        horizon = max([start_s, *ends]) + num_bytes / min(self.capacity[r] for r in path) + 1.0
        if deadline_s is not None:
            horizon = deadline_s
        left = float(num_bytes)
        booked: list[Reservation] = []
        for t0, t1, free in self._pieces(path, start_s, horizon) if horizon > start_s else []:
            if left <= 0:
                break
            if free <= TOLERANCE * min(self.capacity[r] for r in path):
                continue
            end_s = min(t1, t0 + left / free)
            moved = min(left, free * (end_s - t0))  # the interval as floats have it, so that the rate is never above
            if end_s > t0:
                booked.append(self.reserve(link, moved, start_s=t0, end_s=end_s, owner=owner))
                left -= moved
        if left > TOLERANCE * max(1.0, num_bytes):
            for reservation in booked:
                self.release(reservation)
            raise OversubscribedError(
                f"{link}: {num_bytes / 1e9:.3f} GB of {owner!r} do not fit between {start_s:g} s and {horizon:g} s; "
                f"{(num_bytes - left) / 1e9:.3f} GB do; move less or later"
            )
        return tuple(booked)

    # -- a whole step --------------------------------------------------------------------------------------------------

    def predict(self, segments: Iterable[Segment], transfers: Iterable[Transfer]) -> Prediction:
        """Play one step: compute segments in order, transfers between them. See `timeline.predict`."""
        from gemworks.netmem.timeline import predict

        return predict(self, segments, transfers)
