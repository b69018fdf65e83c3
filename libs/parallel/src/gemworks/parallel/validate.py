"""Predicted against measured step time on the devices at hand: `torchrun ... -m gemworks.parallel.validate --out DIR`.

Single layers are timed alone at two sizes (split "calibrate"), and the tiers are measured. From these alone the
simulator predicts whole steps of other sizes, depths and plans (split "validate"), which are then measured. Layers are
the large matrix products of a GEM-like block; steps are forward and backward without the optimizer.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from gemworks.parallel import presets
from gemworks.parallel.cluster import ClusterSpec
from gemworks.parallel.experts import EnsembleExperts
from gemworks.parallel.fsdp import FsdpPolicy, apply_fsdp
from gemworks.parallel.lengths import LengthLaw
from gemworks.parallel.measure import measure_cluster, slowest_seconds
from gemworks.parallel.meshes import build_meshes
from gemworks.parallel.plan import ParallelPlan
from gemworks.parallel.profile import LayerProfile, ModelProfile
from gemworks.parallel.simulation import simulate
from gemworks.parallel.step_graph import SimulationConfig
from torch import Tensor, nn

Kind = Literal["alone", "shard", "replica", "expert"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: `depth` blocks of `width` on `tokens` rows, run as `kind` says."""

    kind: Kind
    depth: int
    width: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.depth}x{self.width} tokens {self.tokens}"


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """A row of simulator_error.csv; `error_pct` is (predicted - measured) / measured."""

    config: str
    split: Literal["calibrate", "validate"]
    predicted_ms: float
    measured_ms: float
    error_pct: float


class Block(nn.Module):
    """x + down(gelu(up(x))), four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ExpertStack(nn.Module):
    """Ensembles of one expert per rank, one after the other."""

    def __init__(self, depth: int, width: int, world: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()

        def make(i: int) -> nn.Module:
            torch.manual_seed(i)
            return Block(width)

        self.blocks = nn.ModuleList(EnsembleExperts(make, world, group) for _ in range(depth))
        self.world = world

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, EnsembleExperts)
            x = block(x, [x.shape[0]] * block.size)
        return x


class _LayerTimes:
    """Forward and backward of one block as lines in the number of tokens, from two measured sizes."""

    def __init__(
        self, width: int, sizes: Sequence[int], device: torch.device, dtype: torch.dtype, repeats: int
    ) -> None:
        self.width, self.sizes = width, tuple(sizes)
        self.points: list[tuple[int, float, float]] = []
        depth = 4
        block = Stack(depth, width).to(device=device, dtype=dtype)
        for tokens in sizes:
            x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)

            def both(x: Tensor = x) -> None:
                block(x).float().pow(2).mean().backward()
                block.zero_grad(set_to_none=True)

            def forward(x: Tensor = x) -> None:
                block(x)

            whole, ahead = 1e3 * slowest_seconds(both, device, repeats), 1e3 * slowest_seconds(forward, device, repeats)
            self.points.append((tokens, ahead / depth, (whole - ahead) / depth))

    def at(self, tokens: int) -> tuple[float, float]:
        """(forward, backward) in ms, by the line through the two points."""
        (a, f0, b0), (b, f1, b1) = self.points
        t = (tokens - a) / (b - a)
        return f0 + t * (f1 - f0), b0 + t * (b1 - b0)


def predict_ms(case: Case, times: tuple[float, float], cluster: ClusterSpec, dtype: torch.dtype) -> float:
    """The simulator's step time of a case.

    Args:
        case: what is run.
        times: forward and backward of one block at the case's tokens, ms; for experts, of the joint batch.
        cluster: with measured tiers.
        dtype: of weights on the wire; gradients travel in float32.
    """
    world = cluster.num_gpus
    params = 8 * case.width**2
    expert = case.kind == "expert"
    layers = tuple(
        LayerProfile(
            name=f"block{i}",
            params=params * (world if expert else 1),
            flops=2.0 * params * case.tokens,
            forward_us=times[0] * 1e3,
            backward_us=times[1] * 1e3,
            length_share=0.0,
            exchange_bytes=case.tokens * case.width * dtype.itemsize if expert else 0.0,
            kind="expert" if expert else "dense",
        )
        for i in range(case.depth)
    )
    model = ModelProfile(
        name=case.name,
        layers=layers,
        num_experts=world if expert else 0,
        weight_bytes=dtype.itemsize,
        optimizer_us_per_million=0.0,
        law=LengthLaw(name="uniform", max_len=1),
    )
    shard = world if case.kind == "shard" else 1
    plan = ParallelPlan.for_world(world, shard=shard, expert=world if expert else None)
    if case.kind == "alone":
        cluster, plan = cluster.resized(1), ParallelPlan.for_world(1, shard=1)
    config = SimulationConfig(balance="none", overlap_exchange=False)
    return simulate(plan, model, cluster, config, check_memory=False).step_us / 1e3


def measure_case(case: Case, device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    """The measured step time of a case, ms."""
    world = dist.get_world_size()
    x = torch.randn(case.tokens, case.width, device=device, dtype=dtype, requires_grad=True)
    torch.manual_seed(0)
    if case.kind == "expert":
        model: nn.Module = ExpertStack(case.depth, case.width, world, dist.group.WORLD if world > 1 else None)
        model = model.to(device=device, dtype=dtype)
    elif case.kind == "alone":
        model = Stack(case.depth, case.width).to(device=device, dtype=dtype)
    else:
        model = Stack(case.depth, case.width).to(device=device, dtype=torch.float32 if case.kind == "shard" else dtype)
        shard = world if case.kind == "shard" else 1
        plan = ParallelPlan.for_world(world, shard=shard)
        meshes = build_meshes(plan, presets.h200_host(8).resized(world), device_type=device.type)
        policy = FsdpPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        apply_fsdp(model, meshes, [f"blocks.{i}" for i in range(case.depth)], policy)

    def step() -> None:
        model(x).float().pow(2).mean().backward()
        model.zero_grad(set_to_none=True)

    return 1e3 * slowest_seconds(step, device, repeats)


def validate(
    device: torch.device,
    *,
    widths: Sequence[int] = (2048, 4096),
    calibrate_tokens: Sequence[int] = (4096, 16384),
    validate_tokens: Sequence[int] = (6144, 12288),
    depth: int = 6,
    repeats: int = 11,
) -> tuple[list[ErrorRow], ClusterSpec]:
    """Calibrate, predict, measure; every rank of the world calls it and gets the same rows but for rounding.

    Returns:
        Rows of both splits, and the cluster with measured tiers.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    world = dist.get_world_size()
    sizes = (2**20, 2**27) if device.type == "cuda" else (2**14, 2**20)
    cluster = presets.h200_host(8).resized(world)
    if world > 1:
        cluster = measure_cluster(cluster, device=device, sizes=sizes)
    rows: list[ErrorRow] = []
    kinds: tuple[Kind, ...] = ("alone",) if world == 1 else ("alone", "shard", "expert")
    for width in widths:
        layer = _LayerTimes(width, calibrate_tokens, device, dtype, repeats)
        for tokens, f, b in layer.points:
            line = sum(layer.at(tokens))
            rows.append(_row(f"layer {width} tokens {tokens}", "calibrate", line, f + b))
        for tokens in validate_tokens:
            for kind in kinds:
                case = Case(kind=kind, depth=depth, width=width, tokens=tokens)
                # An expert sees the joint batch; each rank runs one expert.
                times = layer.at(tokens * (world if kind == "expert" else 1))
                rows.append(
                    _row(
                        case.name,
                        "validate",
                        predict_ms(case, times, cluster, dtype),
                        measure_case(case, device, dtype, repeats),
                    )
                )
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return rows, cluster


def _row(config: str, split: Literal["calibrate", "validate"], predicted: float, measured: float) -> ErrorRow:
    return ErrorRow(
        config=config,
        split=split,
        predicted_ms=predicted,
        measured_ms=measured,
        error_pct=100 * (predicted - measured) / measured,
    )


def write_csv(path: Path, rows: Sequence[ErrorRow], gpu: str) -> None:
    """simulator_error.csv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["config", "split", "predicted_ms", "measured_ms", "error_pct", "gpu", "torch"])
        for r in rows:
            a, b, c, d, e = dataclasses.astuple(r)
            writer.writerow([a, b, f"{c:.4f}", f"{d:.4f}", f"{e:.2f}", gpu, torch.__version__])


def main(argv: Sequence[str] | None = None) -> int:
    """Run under torchrun with one process per GPU; writes simulator_error.csv and cluster.toml."""
    parser = argparse.ArgumentParser(prog="python -m gemworks.parallel.validate", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        parser.error(
            "needs CUDA and torchrun: torchrun --nproc-per-node 2 -m gemworks.parallel.validate --out docs/measured"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows, cluster = validate(device)
    if dist.get_rank() == 0:
        world = dist.get_world_size()
        write_csv(args.out / f"simulator_error_x{world}.csv", rows, f"{torch.cuda.get_device_name()} x{world}")
        cluster.to_toml(args.out / f"cluster_x{world}.toml")
        for r in rows:
            print(f"{r.config:36} {r.split:9} {r.predicted_ms:9.3f} {r.measured_ms:9.3f} {r.error_pct:+7.2f} %")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
