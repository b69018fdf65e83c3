"""Who holds what: for every rank its place, its coordinates, its weights, experts and table rows (text and JSON)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemworks.parallel._check import kind
from gemworks.parallel._lines import plan_lines
from gemworks.parallel.cluster import ClusterSpec
from gemworks.parallel.layout import Layout
from gemworks.parallel.tables import TableShards, TableSpec, shard_tables


@dataclass(frozen=True, kw_only=True)
class Description:
    """What `describe` found; `ranks` holds one dict per described rank, with stable keys."""

    plan: str
    cluster: str
    axes: list[dict[str, Any]]
    ranks: list[dict[str, Any]]

    def to_json(self) -> str:
        """The whole description, sorted keys, one line."""
        content = {"plan": self.plan, "cluster": self.cluster, "axes": self.axes, "ranks": self.ranks}
        return json.dumps(content, sort_keys=True)

    def text(self) -> str:
        """The same for people; stable, so that two runs can be compared with diff."""
        lines = [*plan_lines(self.plan, "plan     "), f"cluster  {self.cluster}", ""]
        lines.append(f"{'axis':22} {'size':>6} {'groups':>7}  tier")
        lines += [f"{a['axis']:22} {a['size']:>6} {a['num_groups']:>7}  {a['tier'] or '-'}" for a in self.axes]
        for r in self.ranks:
            where = f"zone {r['zone']} domain {r['domain']} gpu {r['gpu']}"
            lines += ["", f"rank {r['rank']}  {where}  communicators {r['num_communicators']}"]
            lines += [
                f"  {view:8}" + " ".join(f"{a} {i}" for a, i in coords.items())
                for view, coords in r["coordinates"].items()
            ]
            lines.append(f"  holds   dense weights 1/{r['dense']['of']} (part {r['dense']['part']})")
            if "experts" in r:
                e = r["experts"]
                lines.append(f"          experts {e['experts']} 1/{e['of']} (part {e['part']})")
            for t in r.get("tables", []):
                lines.append(
                    f"          table {t['table']} rows {t['first_row']}..{t['last_row']} of {t['num_rows']} (dim "
                    f"{t['dim']})"
                )
            for t in r.get("stored", []):
                lines.append(
                    f"          stores  dim {t['dim']} rows {t['first']}..{t['last']} of {t['rows']} between steps"
                )
        return "\n".join(lines)


def describe(
    layout: Layout,
    cluster: ClusterSpec,
    *,
    num_experts: int | None = None,
    tables: Sequence[TableSpec] = (),
    ranks: Sequence[int] | None = None,
) -> Description:
    """Who holds what.

    Args:
        layout: the groups.
        cluster: for the tier that each axis crosses.
        num_experts: of the model; needs `plan.experts`.
        tables: of the model; needs `plan.sparse`.
        ranks: which ranks to list; all if None.

    Raises:
        ValueError: experts or tables for a plan without that view, experts that don't divide, or another cluster than
            the plan's.
    """
    plan = layout.plan
    plan.validate(cluster, num_experts=num_experts)
    for t in tables:
        kind("tables", t, TableSpec)
    if tables and plan.sparse is None:
        raise ValueError("tables: got tables for a plan without a sparse view; give the plan table_group")
    if num_experts is not None and plan.experts is None:
        raise ValueError("num_experts: got experts for a plan without an experts view; give the plan expert")
    shards = shard_tables(tables, plan.sparse.table_group) if plan.sparse is not None else ()
    tiers = layout.crossings(cluster)
    axes = [
        {"axis": f"{v}.{a}", "size": n, "num_groups": plan.world_size // n, "tier": tiers[v, a]}
        for v in plan.views()
        for a, n in plan.sizes(v).items()
    ]
    chosen = range(plan.world_size) if ranks is None else ranks
    return Description(
        plan=plan.text(),
        cluster=f"{cluster.name}: {cluster.shape_text()}",
        axes=axes,
        ranks=[_one_rank(layout, cluster, r, num_experts, shards) for r in chosen],
    )


def _one_rank(
    layout: Layout, cluster: ClusterSpec, rank: int, num_experts: int | None, shards: Sequence[TableShards]
) -> dict[str, Any]:
    plan = layout.plan
    coords = {v: layout.coordinates(rank, v) for v in plan.views()}
    found: dict[str, Any] = {
        "rank": rank,
        "zone": rank // cluster.gpus_per_zone,
        "domain": rank // cluster.gpus_per_domain,
        "gpu": rank % cluster.gpus_per_domain,
        "num_communicators": len(layout.communicators(rank)),
        "coordinates": coords,
        "dense": {"part": coords["dense"]["shard"], "of": plan.dense.shard},
    }
    if plan.experts is not None and num_experts is not None:
        per_rank = num_experts // plan.experts.expert
        first = coords["experts"]["expert"] * per_rank
        found["experts"] = {
            "experts": list(range(first, first + per_rank)),
            "part": coords["experts"]["expert_shard"],
            "of": plan.experts.expert_shard,
        }
    if plan.sparse is not None and shards:
        g, part, parts = coords["sparse"]["table_group"], coords["sparse"]["replica_shard"], plan.sparse.replica_shard
        found["tables"] = [
            {
                "table": t.spec.name,
                "dim": t.spec.dim,
                "num_rows": t.spec.num_rows,
                "first_row": t.rows_on(g)[0],
                "last_row": t.rows_on(g)[-1],
            }
            for s in shards
            for t in s.tables
            if len(t.rows_on(g))
        ]
        found["stored"] = [
            {
                "dim": s.dim,
                "rows": s.padded_rows(g, parts),
                "first": part * (s.padded_rows(g, parts) // parts),
                "last": (part + 1) * (s.padded_rows(g, parts) // parts) - 1,
            }
            for s in shards
            if s.num_rows[g]
        ]
    return found
