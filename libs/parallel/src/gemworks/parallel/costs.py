"""What a collective costs on a tiered network: closed forms, contention, bytes per tier.

Letters: S message bytes (as the cluster file defines it per collective), n ranks of a group, m of them in one NVLink
domain, d domains and z zones that the group touches, a latency of a step, w bus bandwidth of one GPU.

On one tier (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005;
Hockney's a + S/w):

- ring all-gather, reduce-scatter: `(n-1) a + (n-1)/n S/w`; ring all-reduce: twice that; ring (pipelined) broadcast:
  `(n-1) a + S/w`
- tree all-reduce (double binary tree): `2 ceil(log2 n) a + 2 S/w`
- all-to-all, all peers at once: `a + max((n-1)/n S/w, posts * o)`: messages to peers beyond the NVLink domain are
  posted one by one (LogGP's overhead o; Alexandrov, Ionescu, Schauser, Scheiman, "LogGP", 1995), in chunks, while the
  wire carries those before; see `Posting`

Over several tiers a ring visits a group's domains and zones one after the other, so the same bytes `e` pass every
edge. An edge out of a domain uses the NICs of the group's m members there; an edge out of a zone shares the zone's
uplink with the other groups that leave it. All groups of an axis run the collective at the same time. Hence

    time = latency + max(e / w_nvlink, e / (m w_zone), load(zone) / (gpus_per_zone w_cross))

with `load` the sum of e over the groups that cross. The bandwidth terms assume enough channels to use all m NICs, as
NCCL does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from gemworks.parallel._check import number, one_of, whole
from gemworks.parallel.cluster import COLLECTIVES, ClusterSpec, Collective, Tier
from torch import Tensor

Algorithm = Literal["auto", "ring", "tree"]


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """How every group of an axis lies on the tiers, when all lie alike.

    Attributes:
        size: ranks in the group.
        num_domains: NVLink domains that it touches (`size / num_domains` ranks in each).
        num_zones: zones that it touches.
    """

    size: int
    num_domains: int = 1
    num_zones: int = 1

    def __post_init__(self) -> None:
        for name in ("size", "num_domains", "num_zones"):
            whole(f"GroupShape: {name}", getattr(self, name))
        if self.size % self.num_domains or self.num_domains % self.num_zones:
            raise ValueError(
                f"GroupShape: got size {self.size}, {self.num_domains} domains, {self.num_zones} zones; expected each "
                "to divide the one before; give uneven groups as a tensor of ranks"
            )

    @property
    def ranks_per_domain(self) -> int:
        return self.size // self.num_domains

    @property
    def widest_tier(self) -> Tier | None:
        """The slowest tier that the group crosses; None for one rank."""
        if self.size == 1:
            return None
        return "cross_zone" if self.num_zones > 1 else "zone" if self.num_domains > 1 else "nvlink"


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """The predicted time of one collective, run by all groups of an axis at once.

    Attributes:
        us: time in microseconds.
        latency_us: the part that does not depend on the size.
        algorithm: "ring", "tree", "direct" (all-to-all) or "none" (one rank).
        tier: the tier that limits the bandwidth; None for one rank.
        bytes_by_tier: bytes sent over each tier by one *average* rank; an edge counts on the widest tier that it
            crosses.
    """

    us: float
    latency_us: float
    algorithm: str
    tier: Tier | None
    bytes_by_tier: Mapping[Tier, float]


@dataclass(frozen=True, kw_only=True)
class Posting:
    """What it costs a process to post one network message, whatever its size.

    The figures are NCCL's own: 1 us to post on an Intel host (2 us on AMD), three posts a message with the Simple
    protocol (src/graph/tuning.cc, getNetOverhead and its use for rings), chunks of 128 KiB in send/recv
    (NCCL_P2P_NET_CHUNKSIZE). One thread posts for a GPU, so posts do not overlap one another.

    Attributes:
        us: o, per chunk.
        chunk_bytes: longer messages are posted in such pieces.
    """

    us: float = 3.0
    chunk_bytes: int = 128 * 1024

    def us_of(self, num_peers: float, message_bytes: float) -> float:
        """Time to post a message to each of some peers; nothing if there is nothing to say."""
        if message_bytes <= 0:
            return 0.0
        return self.us * num_peers * max(1, math.ceil(message_bytes / self.chunk_bytes))


NO_COST = CollectiveCost(us=0.0, latency_us=0.0, algorithm="none", tier=None, bytes_by_tier={})


def edge_bytes(collective: Collective, size: int, nbytes: float, algorithm: str = "ring") -> float:
    """Bytes that one rank sends in a collective over `size` ranks (all-to-all: to all peers together).

    Args:
        collective: which.
        size: ranks in the group.
        nbytes: S: the gathered size, or the rank's input.
        algorithm: "ring" or, for all-reduce, "tree".

    Example:
        >>> edge_bytes("all_reduce", 4, 100.0)
        150.0
    """
    one_of("collective", collective, COLLECTIVES)
    whole("size", size)
    number("nbytes", nbytes, least=0)
    if size == 1:
        return 0.0
    if collective == "all_reduce":
        return 2.0 * nbytes if algorithm == "tree" else 2 * (size - 1) / size * nbytes
    if collective == "broadcast":
        return float(nbytes)
    return (size - 1) / size * nbytes


def collective_cost(
    collective: Collective,
    groups: GroupShape | Tensor,
    nbytes: float,
    cluster: ClusterSpec,
    algorithm: Algorithm = "auto",
    posting: Posting | None = None,
) -> CollectiveCost:
    """Predict one collective.

    Args:
        collective: which.
        groups: `GroupShape`, or the global ranks of every group, int64 [num_groups, size].
        nbytes: S in bytes; see the cluster file.
        cluster: the rates.
        algorithm: "auto" takes the faster of ring and tree for an all-reduce and the ring for the others.
        posting: cost of an all-to-all's messages; None: bytes and latency alone.

    Returns:
        `CollectiveCost`; zero for groups of one rank.

    Raises:
        ValueError: an unknown word, a negative size, a tree for something else than an all-reduce, or a tier that the
            cluster lacks.
    """
    one_of("collective", collective, COLLECTIVES)
    number("nbytes", nbytes, least=0)
    one_of("algorithm", algorithm, get_args(Algorithm))
    if algorithm == "tree" and collective != "all_reduce":
        raise ValueError(
            f"algorithm: got 'tree' for {collective}, expected 'ring' or 'auto': only all_reduce has a tree"
        )
    lie = _Lie.of(groups, cluster)
    if lie.size == 1:
        return NO_COST
    if collective == "all_to_all":
        return _all_to_all(lie, nbytes, cluster, posting)
    candidates = ["ring"] if collective != "all_reduce" else ["ring", "tree"] if algorithm == "auto" else [algorithm]
    return min((_ring_or_tree(collective, lie, nbytes, cluster, a) for a in candidates), key=lambda c: c.us)


@dataclass(frozen=True)
class _Lie:
    """How groups lie on the tiers, reduced to what the formulas need (worst group where they differ)."""

    size: int
    domains: int  # most domains that a group touches
    zones: int
    min_members: int  # fewest members of a group that leaves its domain, in one domain
    has_nvlink: bool  # some group has two members in one domain
    zone_share: float  # most groups that leave one zone / gpus_per_zone
    a2a_nvlink: float  # all-to-all: largest fraction of peers in one's own domain
    a2a_domain: float  # all-to-all: largest fraction of a rank's bytes that leaves its domain
    a2a_zone: float  # all-to-all: largest mean fraction, over a zone's GPUs, that leaves the zone
    edges: tuple[float, float, float]  # mean ring edges per rank on nvlink, zone, cross_zone
    peers: tuple[float, float, float]  # mean fraction of peers (of size) on each tier

    @staticmethod
    def of(groups: GroupShape | Tensor, cluster: ClusterSpec) -> _Lie:
        return _lie_of_shape(groups, cluster) if isinstance(groups, GroupShape) else _lie_of_ranks(groups, cluster)


def _lie_of_shape(s: GroupShape, cluster: ClusterSpec) -> _Lie:
    n, m, d, z = s.size, s.ranks_per_domain, s.num_domains, s.num_zones
    if m > cluster.gpus_per_domain or d // z > cluster.domains_per_zone or z > cluster.num_zones:
        raise ValueError(
            f"groups: got {m} ranks a domain, {d // z} domains a zone, {z} zones; the cluster has "
            f"{cluster.shape_text()}"
        )
    mz = n // z
    leave_zone = float(z > 1)
    cross = z if z > 1 else 0
    zone_edges = (d - z if z > 1 else d) if d > 1 else 0
    nv = n - cross - zone_edges
    return _Lie(
        size=n,
        domains=d,
        zones=z,
        min_members=m,
        has_nvlink=m > 1,
        zone_share=leave_zone / mz,
        a2a_nvlink=(m - 1) / n,
        a2a_domain=(n - m) / n,
        a2a_zone=(n - mz) / n,
        edges=(nv / n, zone_edges / n, cross / n),
        peers=((m - 1) / n, (mz - m) / n, (n - mz) / n),
    )


def _lie_of_ranks(groups: Tensor, cluster: ClusterSpec) -> _Lie:
    if not isinstance(groups, Tensor) or groups.ndim != 2 or not groups.numel() or groups.is_floating_point():
        got = f"{groups.dtype} {tuple(groups.shape)}" if isinstance(groups, Tensor) else type(groups).__name__
        raise ValueError(f"groups: got {got}, expected a GroupShape, or ranks, int64 [num_groups, size]")
    G, n = groups.shape
    if n == 1:
        return _lie_of_shape(GroupShape(size=1), cluster)
    if int(groups.max()) >= cluster.num_gpus or int(groups.min()) < 0:
        raise ValueError(
            f"groups: got ranks {int(groups.min())}..{int(groups.max())}, expected 0..{cluster.num_gpus - 1}"
        )
    group_idx = torch.arange(G).repeat_interleave(n)
    ranks = groups.reshape(-1).to(torch.int64)

    def members(unit_size: int, num_units: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        key = group_idx * num_units + ranks // unit_size
        pairs, inverse, counts = torch.unique(key, return_inverse=True, return_counts=True)
        units_per_group = torch.bincount(pairs // num_units, minlength=G)
        return pairs, counts, counts[inverse], units_per_group

    num_domains = cluster.domains_per_zone * cluster.num_zones
    dp, dm, m_of_rank, d_of_group = members(cluster.gpus_per_domain, num_domains)
    zp, _, mz_of_rank, z_of_group = members(cluster.gpus_per_zone, cluster.num_zones)
    leaves_domain = d_of_group[dp // num_domains] > 1
    leaves_zone = z_of_group[zp // cluster.num_zones] > 1
    per_zone = torch.bincount((zp % cluster.num_zones)[leaves_zone], minlength=cluster.num_zones)
    zone_of_rank = ranks // cluster.gpus_per_zone
    zone_out = torch.bincount(zone_of_rank, weights=(n - mz_of_rank).double() / n, minlength=cluster.num_zones)
    cross = torch.where(z_of_group > 1, z_of_group, 0)
    zone_edges = torch.where(d_of_group > 1, d_of_group - cross, 0)
    nv = n - cross - zone_edges
    total = float(G * n)
    return _Lie(
        size=n,
        domains=int(d_of_group.max()),
        zones=int(z_of_group.max()),
        min_members=int(dm[leaves_domain].min()) if bool(leaves_domain.any()) else n,
        has_nvlink=bool((dm > 1).any()),
        zone_share=float(per_zone.max()) / cluster.gpus_per_zone,
        a2a_nvlink=float((m_of_rank - 1).max()) / n,
        a2a_domain=float((n - m_of_rank).max()) / n,
        a2a_zone=float(zone_out.max()) / cluster.gpus_per_zone,
        edges=(float(nv.sum()) / total, float(zone_edges.sum()) / total, float(cross.sum()) / total),
        peers=(
            float((m_of_rank - 1).sum()) / total / n,
            float((mz_of_rank - m_of_rank).sum()) / total / n,
            float((n - mz_of_rank).sum()) / total / n,
        ),
    )


def _rate(cluster: ClusterSpec, tier: Tier, collective: Collective) -> tuple[float, float]:
    if tier not in cluster.tiers:
        raise ValueError(
            f"{collective}: the group crosses the tier {tier}, which {cluster.name} lacks; add [tiers.{tier}]"
        )
    rate = cluster.tiers[tier][collective]
    return rate.bytes_per_s, rate.latency_us


def _ring_or_tree(
    collective: Collective, lie: _Lie, nbytes: float, cluster: ClusterSpec, algorithm: str
) -> CollectiveCost:
    e = edge_bytes(collective, lie.size, nbytes, algorithm)
    terms: list[tuple[float, Tier]] = []
    alphas: dict[Tier, float] = {}
    if lie.has_nvlink:
        w, alphas["nvlink"] = _rate(cluster, "nvlink", collective)
        terms.append((e / w, "nvlink"))
    if lie.domains > lie.zones or lie.zones > 1:
        # Groups that cross zones with one domain in each use NICs too; a cluster without a zone tier has them in
        # cross_zone.
        has_zone_tier = "zone" in cluster.tiers or lie.domains > lie.zones
        if has_zone_tier:
            w, alphas["zone"] = _rate(cluster, "zone", collective)
            # The groups that leave a domain have no more than its GPUs, min_members each or more: what they load its
            # NICs with together is never above what the thinnest loads its own.
            terms.append((e / w / lie.min_members, "zone"))
    if lie.zones > 1:
        w, alphas["cross_zone"] = _rate(cluster, "cross_zone", collective)
        terms.append((e / w * lie.zone_share, "cross_zone"))
    seconds, tier = max(terms)
    passes = 2 if collective == "all_reduce" else 1
    if algorithm == "tree":
        # Reduce within the domain, then between domains of a zone, then between zones; and back.
        depth: dict[Tier, int] = {
            "nvlink": _log2(-(-lie.size // lie.domains)),
            "zone": _log2(-(-lie.domains // lie.zones)),
            "cross_zone": _log2(lie.zones),
        }
        latency = passes * sum(alphas.get(t, 0.0) * k for t, k in depth.items() if k)
    else:
        cross = lie.zones if lie.zones > 1 else 0
        zone = lie.domains - cross if lie.domains > 1 else 0
        count: dict[Tier, int] = {"nvlink": lie.size - cross - zone, "zone": zone, "cross_zone": cross}
        used: dict[Tier, int] = {t: k for t, k in count.items() if k}
        cycle = sum(alphas.get(t, 0.0) * k for t, k in used.items())
        # A block passes every edge of the cycle but one.
        latency = passes * (cycle - min(alphas.get(t, 0.0) for t in used))
    sent = {t: e * f for t, f in zip(("nvlink", "zone", "cross_zone"), lie.edges, strict=True) if f}
    return CollectiveCost(
        us=latency + seconds * 1e6,
        latency_us=latency,
        algorithm=algorithm,
        tier=tier,
        bytes_by_tier=sent,  # type: ignore[arg-type]
    )


def _all_to_all(lie: _Lie, nbytes: float, cluster: ClusterSpec, posting: Posting | None) -> CollectiveCost:
    terms: list[tuple[float, Tier]] = []
    latency = 0.0
    if lie.has_nvlink:
        w, a = _rate(cluster, "nvlink", "all_to_all")
        terms.append((nbytes * lie.a2a_nvlink / w, "nvlink"))
        latency = max(latency, a)
    if lie.domains > 1 and ("zone" in cluster.tiers or lie.domains > lie.zones):
        w, a = _rate(cluster, "zone", "all_to_all")
        terms.append((nbytes * lie.a2a_domain / w, "zone"))
        latency = max(latency, a)
    if lie.zones > 1:
        w, a = _rate(cluster, "cross_zone", "all_to_all")
        terms.append((nbytes * lie.a2a_zone / w, "cross_zone"))
        latency = max(latency, a)
    seconds, tier = max(terms)
    if posting is not None:
        seconds = max(seconds, 1e-6 * posting.us_of(lie.size * (lie.peers[1] + lie.peers[2]), nbytes / lie.size))
    sent = {t: nbytes * f for t, f in zip(("nvlink", "zone", "cross_zone"), lie.peers, strict=True) if f}
    return CollectiveCost(
        us=latency + seconds * 1e6,
        latency_us=latency,
        algorithm="direct",
        tier=tier,
        bytes_by_tier=sent,  # type: ignore[arg-type]
    )


def _log2(x: int) -> int:
    return math.ceil(math.log2(x)) if x > 1 else 0
