"""`python -m gemworks.parallel.bench`: what the planner costs, what balancing buys, what overlaps on the GPUs at hand.

Sections: `plan` (planner and mesh seconds), `balance` (max/mean cost over ranks), `ladder` (predicted), `gpu` (under
torchrun: collective rates, exposed communication of FSDP, of the expert exchange, of sharded tables). Rows go to CSV.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gemworks.parallel import presets
from gemworks.parallel.balance_report import balance_rows
from gemworks.parallel.balance_report import to_csv as balance_csv
from gemworks.parallel.cluster import ClusterSpec
from gemworks.parallel.lengths import CostModel, LengthLaw
from gemworks.parallel.measured_rows import BENCH_COLUMNS, PREDICTION_COLUMNS, stamp, write_rows
from gemworks.parallel.meshes import build_meshes
from gemworks.parallel.placement import place
from gemworks.parallel.plan import ParallelPlan
from gemworks.parallel.planner import Rung, ladder_text, ladders, search
from gemworks.parallel.profile import gem_like
from gemworks.parallel.simulation import Simulation


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m gemworks.parallel.bench", description=__doc__)
    parser.add_argument(
        "sections", nargs="*", help="plan, balance, ladder, gpu; all that can run here if none is named"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for the CSV files; nothing is written without it"
    )
    parser.add_argument("--max-ranks", type=int, default=4096, help="of the balance table")
    parser.add_argument("--gpu-parts", nargs="+", default=(), help="of gpu: rates, experts, tables, fsdp; default: all")
    args = parser.parse_args(argv)
    strange = sorted(set(args.gpu_parts) - {"rates", "experts", "tables", "fsdp"})
    if strange:
        parser.error(f"unknown --gpu-parts {strange}; choose from rates, experts, tables, fsdp")
    unknown = sorted(set(args.sections) - {"plan", "balance", "ladder", "gpu"})
    if unknown:
        parser.error(f"unknown sections {unknown}; choose from plan, balance, ladder, gpu")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)  # what is wrong with it shows now, not after the first section
    chosen = args.sections or ["plan", "balance", "ladder", *(["gpu"] if torch.cuda.device_count() > 1 else [])]
    lead = int(os.environ.get("RANK", "0")) == 0
    rows: list[dict[str, Any]] = []

    def begins(section: str) -> bool:
        """Whether the section is to run here; says which of how many begins."""
        if section in chosen and lead:
            print(f"[{chosen.index(section) + 1}/{len(chosen)}] {section}", flush=True)
        return section in chosen and lead

    if begins("plan"):
        rows += _plan_rows()
    if begins("balance"):
        table = [
            row
            for name in ("uniform", "zipf1.2")
            for n in (8, 64, 512, 4096)
            if n <= args.max_ranks
            for row in balance_rows(LengthLaw.named(name, 2048), n, cost=CostModel(linear=1.0, quadratic=1 / 2048))
        ]
        print(balance_csv(table))
        if args.out:
            same = stamp("gemworks.parallel.bench", 0)
            facts = {name: same[name] for name in ("gpu", "command", "commit", "torch")}
            (args.out / "parallel_balance.csv").write_text(balance_csv(table, facts))
    if begins("ladder"):
        found = ladders(gem_like(), presets.roce_cluster(4096))
        print("predicted, not measured:\n" + ladder_text(found))
        if args.out:
            same = stamp("gemworks.parallel.bench", 0)
            predicted = [{**same, "gpu": "predicted", **row} for row in prediction_rows(found)]
            write_rows(args.out / "plan_predictions.csv", PREDICTION_COLUMNS, predicted)
    if rows:
        _report(rows, args.out, "parallel_planner.csv", 0)
    if begins("gpu") or "gpu" in chosen:
        from gemworks.parallel.gpu_bench import gpu_rows

        # The file grows section by section: a run that is cut off keeps what it has.
        done: list[dict[str, Any]] = []
        for found, num_gpus in gpu_rows(args.gpu_parts):
            if lead:
                _report(found, None, "", num_gpus)
                done += found
                if args.out is not None:
                    same = stamp("gemworks.parallel.bench", num_gpus)
                    write_rows(args.out / "parallel_h200x2.csv", BENCH_COLUMNS, [{**same, **row} for row in done])
    return 0


def _report(rows: Sequence[dict[str, Any]], out: Path | None, name: str, num_gpus: int) -> None:
    same = stamp("gemworks.parallel.bench", num_gpus)
    for row in rows:
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        print("  ".join(f"{k}={v}" for k, v in shown.items()), flush=True)
    if out is not None:
        write_rows(out / name, BENCH_COLUMNS, [{**same, **row} for row in rows])


def _timed(run: Callable[[], object], repeats: int = 3) -> dict[str, float]:
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    return {"ms": statistics.median(times), "ms_p20": times[len(times) // 5], "ms_p80": times[-1 - len(times) // 5]}


def _mesh_build(plan: ParallelPlan, cluster: ClusterSpec) -> dict[str, float]:
    """Process groups and DeviceMeshes of rank 0 where its placement is known: what one process does, no network."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    placement = place(plan, cluster)

    def build() -> None:
        meshes = build_meshes(plan, cluster, placement=placement)
        for view in plan.views():
            meshes.mesh(view)

    times: list[dict[str, float]] = []
    for _ in range(3):  # groups are remembered as long as the world is there
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world_size)
        try:
            times.append(_timed(build, repeats=1))
        finally:
            dist.destroy_process_group()
    low, mid, high = sorted(t["ms"] for t in times)
    return {"ms": mid, "ms_p20": low, "ms_p80": high}


def prediction_rows(found: Mapping[str, Sequence[Rung]], num_gpus: int = 4096) -> list[dict[str, Any]]:
    """Rows of plan_predictions.csv: every rung by item, then groups of tables over intervals of averaging and zones."""
    rows: list[dict[str, Any]] = []

    def add(name: str, s: Simulation, items: Mapping[str, float]) -> None:
        for item, us in items.items():
            rows.append(
                {
                    "gpus": num_gpus,
                    "plan": f"{name}: {s.plan.text()}",
                    "e2e_mfu": s.mfu,
                    "scaling_ratio": s.scaling_ratio,
                    "item": item,
                    "ms": us / 1e3,
                }
            )

    for kind, rungs in found.items():
        for rung in rungs:
            s = rung.simulation
            add(f"{kind} {rung.name}", s, {"step": s.step_us, **dict(sorted(s.items.items()))})
    for zone in (1024, 2048):
        cluster = presets.roce_cluster(num_gpus, gpus_per_zone=zone)
        for every in (1, 4, 8, 16, 32):
            rungs = ladders(gem_like(), cluster, sync_every=every)["sparse"]
            # The second rung has a mean in every step whatever `every` is; V1 has no replicas, so once is enough.
            for rung in (*(rungs[:1] if every == 1 else ()), rungs[2], rungs[3]):
                add(f"zones of {zone}, {rung.name[:2]}", rung.simulation, {"step": rung.simulation.step_us})
    return rows


def _plan_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for n in (64, 4096, 16384):
        group = min(256, n)
        plan = ParallelPlan.for_world(
            n, shard=group, expert=2, expert_shard=16, table_group=group, replica_shard=min(8, n // group)
        )
        cluster = presets.roce_cluster(n)

        def groups(plan: ParallelPlan = plan, cluster: Any = cluster) -> None:
            layout = place(plan, cluster).layout
            for view, axis in layout.used_axes():
                layout.groups(view, axis)

        rows.append(
            {
                "op": "place and groups",
                "shape": f"{n} ranks",
                "setting": "five dimensions",
                "impl": "gemworks",
                **_timed(groups),
            }
        )
        rows.append(
            {
                "op": "mesh build",
                "shape": f"{n} ranks",
                "setting": "five dimensions, one rank's, fake process group",
                "impl": "gemworks",
                **_mesh_build(plan, cluster),
            }
        )
        model = gem_like()
        rows.append(
            {
                "op": "search",
                "shape": f"{n} GPUs",
                "setting": model.name,
                "impl": "gemworks",
                **_timed(lambda c=cluster, m=model: search(m, c), repeats=1),
            }
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
