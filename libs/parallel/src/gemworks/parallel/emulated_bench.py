"""`python -m gemworks.parallel.emulated_bench --out docs/measured`: placements and ladders on emulated network tiers.

Needs root (see `emulated_network`). Measures the tiers and single layers, predicts whole steps from these alone, then
measures the steps and the bytes that the interfaces carried. Rows go to `parallel_emulated_tiers.csv` and, prefixed
"emulated", to `simulator_error.csv`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gemworks.parallel.cluster import TIERS, ClusterSpec
from gemworks.parallel.costs import collective_cost
from gemworks.parallel.emulated_network import EmulatedNetwork, why_not
from gemworks.parallel.emulated_run import Job, StepResult, StepShape, launch, run_job, step_profile, time_layers
from gemworks.parallel.layout import Layout
from gemworks.parallel.measure import Sample, measure_cluster, slowest_seconds
from gemworks.parallel.measured_rows import ERROR_COLUMNS, TRAILING, merge_rows, stamp, write_rows
from gemworks.parallel.placement import Split, ranks_of_split, split_shape, tier_splits
from gemworks.parallel.plan import VIEW_AXES, ParallelPlan, View
from gemworks.parallel.profile import ModelProfile
from gemworks.parallel.simulation import Simulation, simulate
from gemworks.parallel.splits import model_traffic, place_splits
from gemworks.parallel.step_graph import GLOO, SimulationConfig
from gemworks.parallel.validate import error_row

TIER_COLUMNS = ["config", "plan", "placement", "tier", "predicted_bytes", "measured_bytes", "error_pct", "framing_pct"]
SMALL = StepShape()
WIDE = StepShape(width=384, num_blocks=2, samples=16, num_rows=16384, ids_per_sample=128)
CONFIG = SimulationConfig(
    balance="none",
    sm_slowdown=0.0,
    prefetch=False,
    overlap_exchange=False,
    overlap_tables=False,
    blocking=True,
    wire_factor=GLOO,
    posting=None,  # gloo's latency is measured
)


def row_major_splits(plan: ParallelPlan, cluster: ClusterSpec) -> dict[View, dict[str, Split]]:
    """The tier splits of the row-major numbering.

    Raises:
        ValueError: it is no tier split on this cluster.
    """
    want = Layout.row_major(plan)
    found: dict[View, dict[str, Split]] = {}
    for view in plan.views():
        sizes = tuple(plan.sizes(view).values())
        for splits in tier_splits(sizes, cluster):
            if torch.equal(ranks_of_split(sizes, splits, cluster), want.ranks[view]):
                found[view] = dict(zip(VIEW_AXES[view], splits, strict=True))
                break
        else:
            raise ValueError(f"plan: row-major {view} of {plan.text()} is no split of {cluster.shape_text()}")
    return found


def worst_splits(plan: ParallelPlan, model: ModelProfile, cluster: ClusterSpec) -> dict[View, dict[str, Split]]:
    """The most expensive tier splits by prediction."""
    traffic = model_traffic(plan, model)
    found: dict[View, dict[str, Split]] = {}
    for view in plan.views():
        axes, sizes = VIEW_AXES[view], plan.sizes(view)

        def cost(splits: tuple[Split, ...], view: View = view) -> float:
            where = dict(zip(VIEW_AXES[view], splits, strict=True))
            total = 0.0
            for t in traffic:
                if t.view == view:
                    shape = split_shape(plan.sizes(view)[t.axis], where[t.axis])
                    total += t.calls * collective_cost(t.collective, shape, t.nbytes, cluster).us
            return total

        worst = max(tier_splits(tuple(sizes.values()), cluster), key=cost)
        found[view] = dict(zip(axes, worst, strict=True))
    return found


def jobs_of(shape: StepShape, cluster: ClusterSpec, *, ladders: bool) -> list[Job]:
    """The five-dimensional plan in three places, and the rungs of both ladders in the best place."""
    world, model = cluster.num_gpus, step_profile(shape)

    def plan(shard: int, expert: int, expert_shard: int, group: int, replica_shard: int) -> ParallelPlan:
        return ParallelPlan.for_world(
            world,
            shard=shard,
            expert=expert,
            expert_shard=expert_shard,
            table_group=group,
            replica_shard=replica_shard,
        )

    def best(p: ParallelPlan) -> Mapping[View, Mapping[str, Split]]:
        found = place_splits(p, model, cluster)
        assert found is not None
        return found

    five = plan(4, 2, 2, 2, 2)
    jobs = [
        Job(name="5D, topology-aware (3D, V3)", plan=five, splits=best(five)),
        Job(name="5D, row-major", plan=five, splits=row_major_splits(five, cluster)),
        Job(name="5D, worst", plan=five, splits=worst_splits(five, model, cluster)),
    ]
    rungs = {
        "1D dense": plan(8, 1, 8, 2, 2),
        "2D dense": plan(4, 1, 4, 2, 2),
        "V1 sparse": plan(4, 2, 2, 8, 1),
        "V2 sparse": plan(4, 2, 2, 2, 1),
    }
    return jobs + ([Job(name=n, plan=p, splits=best(p)) for n, p in rungs.items()] if ladders else [])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What rank 0 brings back.

    Attributes:
        cluster: with measured tiers.
        samples: of the tiers' collectives.
        runs: (shape, layer times, jobs, results).
    """

    cluster: ClusterSpec
    samples: Sequence[Sample]
    runs: Sequence[tuple[StepShape, Mapping[str, float], Sequence[Job], Sequence[StepResult]]]


def measure_all(
    rank: int, network: EmulatedNetwork, repeats: int, shapes: Sequence[StepShape], ladders: bool = True
) -> Measured | None:
    """Everything that the ranks do; every rank calls it. The ladders run for the first shape."""
    samples: list[Sample] = []
    cluster = measure_cluster(
        network.cluster(), sizes=(2**17, 2**19, 2**21), repeats=max(3, repeats - 2), record=samples
    )
    cluster = with_copy_rate(cluster)
    runs = []
    for i, shape in enumerate(shapes):
        times = time_layers(shape)
        jobs = jobs_of(shape, cluster, ladders=ladders and i == 0)
        runs.append((shape, times, jobs, [run_job(rank, network, cluster, shape, j, repeats) for j in jobs]))
    return Measured(cluster=cluster, samples=samples, runs=runs) if rank == 0 else None


def with_copy_rate(cluster: ClusterSpec) -> ClusterSpec:
    """`cluster` with the measured rate of a copy (read + write), all processes at once."""
    a = torch.rand(2**20)
    b = torch.empty_like(a)
    seconds = slowest_seconds(lambda: b.copy_(a), torch.device("cpu"), 9)
    gpu = dataclasses.replace(cluster.gpu, hbm_bytes_per_s=2 * 4 * 2**20 / seconds)
    return dataclasses.replace(cluster, gpu=gpu)


def predict(shape: StepShape, times: Mapping[str, float], job: Job, cluster: ClusterSpec) -> Simulation:
    """The simulator's view of a job."""
    return simulate(job.plan, step_profile(shape, times), cluster, CONFIG, splits=job.splits, check_memory=False)


def rows_of(measured: Measured) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of the tiers' bytes, rows of simulator_error.csv), without the columns that all rows share."""
    world = measured.cluster.num_gpus
    tiers: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    for s in measured.samples:
        name = f"emulated {s.tier} {s.collective} {s.nbytes} bytes"
        row = error_row(name, "calibrate", 1e3 * s.fitted_seconds, 1e3 * s.seconds, world)
        errors.append({**dataclasses.asdict(row), "ms": row.measured_ms})
    for shape, times, jobs, results in measured.runs:
        for job, result in zip(jobs, results, strict=True):
            s = predict(shape, times, job, measured.cluster)
            config = f"emulated {job.name}, width {shape.width}"
            row = error_row(config, "validate", s.step_us / 1e3, result.ms, world)
            errors.append({**dataclasses.asdict(row), "ms": row.measured_ms})
            for tier in TIERS:
                want, got = world * s.bytes_by_tier.get(tier, 0.0), result.bytes_by_tier[tier]
                tiers.append(
                    {
                        "config": config,
                        "plan": job.plan.text(),
                        "placement": _splits_text(job),
                        "tier": tier,
                        "predicted_bytes": round(want),
                        "measured_bytes": round(got),
                        "error_pct": 100 * (want - got) / got if got > 1000 else "",
                        "framing_pct": 100 * result.framing_share,
                        "ms": result.ms,
                    }
                )
    return tiers, errors


def _splits_text(job: Job) -> str:
    return "; ".join(
        f"{v} " + ", ".join(f"{a} {'x'.join(map(str, s))}" for a, s in axes.items() if s != (1, 1, 1))
        for v, axes in job.splits.items()
    )


def text_of(tiers: Sequence[Mapping[str, Any]], errors: Sequence[Mapping[str, Any]]) -> str:
    """For people."""
    lines = [f"{'configuration':44} {'predicted':>10} {'measured':>9} {'error':>7}   MB sent: nvlink, zone, cross-zone"]
    for e in errors:
        if e["split"] == "validate":
            sent = [f"{t['measured_bytes'] / 1e6:.1f}" for t in tiers if t["config"] == e["config"]]
            lines.append(
                f"{e['config'][9:]:44} {e['predicted_ms']:>7.0f} ms {e['measured_ms']:>6.0f} ms "
                f"{e['error_pct']:>+6.1f}%   {', '.join(sent)}"
            )
    off = [abs(e["error_pct"]) for e in errors if e["split"] == "validate"]
    bytes_off = [abs(t["error_pct"]) for t in tiers if t["error_pct"] != ""]
    lines.append(
        f"step: median {statistics.median(off):.1f} %, worst {max(off):.1f} %; bytes: worst {max(bytes_off):.2f} %"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Set up, measure, take down, write."""
    parser = argparse.ArgumentParser(prog="python -m gemworks.parallel.emulated_bench", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for the CSV files; nothing is written without it"
    )
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    reason = why_not()
    if reason:
        parser.error(reason)
    with EmulatedNetwork() as network:
        answers = launch(network, measure_all, (network, args.repeats, (SMALL, WIDE)), timeout_s=900)
    for good, value in answers:
        if not good:
            raise RuntimeError(value)
    tiers, errors = rows_of(answers[0][1])
    print(text_of(tiers, errors))
    if args.out is not None:
        same = stamp("gemworks.parallel.emulated_bench", network.world_size)
        write_rows(args.out / "parallel_emulated_tiers.csv", [*TIER_COLUMNS, *TRAILING], [{**same, **r} for r in tiers])
        found = [{**same, **r} for r in errors]
        merge_rows(args.out / "simulator_error.csv", ERROR_COLUMNS, found, key=("config", "num_gpus", "gpu"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
