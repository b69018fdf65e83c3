"""The five dimensions on the three tiers, drawn from a plan as SVG (no dependency)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path

from gemworks.parallel.cluster import ClusterSpec, Tier
from gemworks.parallel.layout import Layout
from gemworks.parallel.plan import View

_TIER_COLOR: dict[Tier, str] = {"nvlink": "#2b8a3e", "zone": "#1864ab", "cross_zone": "#c92a2a"}
_AXES: tuple[tuple[View, str, str], ...] = (
    ("dense", "shard", "FSDP shard"),
    ("dense", "replica", "FSDP replica"),
    ("experts", "expert", "experts (EP)"),
    ("experts", "expert_shard", "expert shard"),
    ("sparse", "table_group", "table group"),
    ("sparse", "replica_shard", "table replica, sharded"),
    ("sparse", "replica", "table replica, averaged"),
)
_CELL, _GAP, _LEFT, _ROW = 11, 3, 210, 74


def draw_plan(layout: Layout, cluster: ClusterSpec, *, rank: int = 0, max_domains: int = 4, max_zones: int = 3) -> str:
    """Draw, for every axis of the plan, the group that one rank belongs to.

    Each row is an axis: zones are boxes, NVLink domains are blocks in them, squares are GPUs. Members of the rank's
    group are filled in the colour of the slowest tier that the group crosses. A large cluster shows the zones and
    domains in which some axis' group has members, first ones first, and says how many are left out.

    Args:
        layout: the groups.
        cluster: the tiers.
        rank: whose groups.
        max_domains, max_zones: drawn at most, per zone and in all.

    Returns:
        SVG text.
    """
    tiers = layout.crossings(cluster)
    axes: list[tuple[View, str, str]] = [
        (v, a, t) for v, a, t in _AXES if v in layout.plan.views() and layout.plan.sizes(v)[a] > 1
    ]
    members: dict[tuple[View, str], set[int]] = {(v, a): set(layout.group_of(rank, v, a)) for v, a, _ in axes}
    zones, domains = _chosen(members, cluster, rank, max_domains, max_zones)
    cells = min(cluster.gpus_per_domain, 8)
    block = cells * (_CELL + 1) + _GAP
    zone_width = max(len(d) for d in domains.values()) * block + 2 * _GAP
    width = _LEFT + len(zones) * (zone_width + 14) + 20
    height = 64 + len(axes) * _ROW + 60
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(layout.plan.text())}</text>',
        f'<text x="10" y="38" fill="#555">{escape(cluster.name)}: {cluster.shape_text()}; groups of rank {rank}</text>',
    ]
    for i, (view, axis, title) in enumerate(axes):
        tier = tiers[view, axis]
        assert tier is not None
        y = 56 + i * _ROW
        size = layout.plan.sizes(view)[axis]
        out.append(f'<text x="10" y="{y + 16}">{escape(title)}: {size}</text>')
        out.append(f'<text x="10" y="{y + 32}" fill="{_TIER_COLOR[tier]}">crosses {tier.replace("_", "-")}</text>')
        shown = 0
        for zi, z in enumerate(zones):
            x0 = _LEFT + zi * (zone_width + 14)
            out.append(
                f'<rect x="{x0}" y="{y}" width="{zone_width}" height="44" fill="none" stroke="#999"/>'
                f'<text x="{x0 + 2}" y="{y + 56}" fill="#777" font-size="10">zone {z}</text>'
            )
            for di, d in enumerate(domains[z]):
                x1 = x0 + _GAP + di * block
                out.append(f'<text x="{x1}" y="{y + 12}" fill="#777" font-size="9">domain {d}</text>')
                for g in range(cells):
                    r = d * cluster.gpus_per_domain + g
                    mine = r in members[view, axis]
                    shown += mine
                    fill = _TIER_COLOR[tier] if mine else "#e9ecef"
                    stroke = ' stroke="black" stroke-width="1.5"' if r == rank else ""
                    place = f'x="{x1 + g * (_CELL + 1)}" y="{y + 18}" width="{_CELL}" height="{_CELL}"'
                    out.append(f'<rect {place} fill="{fill}"{stroke}/>')
        if shown < size:
            out.append(f'<text x="10" y="{y + 46}" fill="#777" font-size="10">{size - shown} members not drawn</text>')
    y = height - 34
    for k, (tier, color) in enumerate(_TIER_COLOR.items()):
        x = 10 + k * 130
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{color}"/>')
        out.append(f'<text x="{x + 18}" y="{y + 11}">{tier.replace("_", "-")}</text>')
    return "\n".join([*out, "</svg>", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the published plan on 4,096 GPUs into the file named."""
    from gemworks.parallel import ParallelPlan, place, presets

    parser = argparse.ArgumentParser(prog="python -m gemworks.parallel.picture", description=main.__doc__)
    parser.add_argument("out", type=Path)
    plan = ParallelPlan.for_world(4096, shard=256, expert=2, expert_shard=16, table_group=256, replica_shard=8)
    cluster = presets.roce_cluster(4096)
    parser.parse_args(argv).out.write_text(draw_plan(place(plan, cluster).layout, cluster), encoding="utf-8")
    return 0


def _chosen(
    members: dict[tuple[View, str], set[int]], cluster: ClusterSpec, rank: int, max_domains: int, max_zones: int
) -> tuple[list[int], dict[int, list[int]]]:
    """Zones and domains to draw: the rank's own, then those where the smallest groups have members."""
    wanted: list[int] = [rank // cluster.gpus_per_domain]
    for group in sorted(members.values(), key=len):
        wanted += [d for d in sorted({r // cluster.gpus_per_domain for r in group}) if d not in wanted]
    per_zone: dict[int, list[int]] = {}
    for d in wanted:
        per_zone.setdefault(d // cluster.domains_per_zone, []).append(d)
    zones = sorted(list(per_zone)[:max_zones])
    return zones, {z: sorted(per_zone[z][:max_domains]) for z in zones}


if __name__ == "__main__":
    raise SystemExit(main())
