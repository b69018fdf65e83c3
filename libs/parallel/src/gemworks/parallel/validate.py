"""Predicted against measured step time on the devices at hand: `torchrun ... -m gemworks.parallel.validate --out DIR`.

Blocks are timed on one GPU at two sizes and two depths (split "calibrate"), and the tiers are measured. From these
alone the simulator predicts whole steps of other sizes, depths and plans (split "validate"), which are then measured.
Layers are the large matrix products of a GEM-like block; steps are forward and backward without the optimizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from gemworks.parallel import presets
from gemworks.parallel.cluster import ClusterSpec
from gemworks.parallel.fsdp import FsdpPolicy, apply_fsdp
from gemworks.parallel.gpu_bench import start_nccl
from gemworks.parallel.lengths import LengthLaw
from gemworks.parallel.measure import measure_cluster, slowest_seconds
from gemworks.parallel.measured_rows import ERROR_COLUMNS, merge_rows, stamp
from gemworks.parallel.meshes import build_meshes
from gemworks.parallel.plan import ParallelPlan
from gemworks.parallel.profile import LayerProfile, ModelProfile
from gemworks.parallel.simulation import simulate
from gemworks.parallel.stacks import ExpertStack, Stack, on_device
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
    num_gpus: int


Times = tuple[float, float, float, float]  # of a block forward and backward, of the loss forward and backward, ms


class LayerTimes:
    """Forward and backward of one block, and of the loss, as lines in the number of tokens; measured on one device.

    Two depths separate the block from the loss, two sizes give the line.

    Attributes:
        points: (tokens, depth, forward ms, forward + backward ms), as measured.
    """

    def __init__(
        self,
        kind: Literal["dense", "expert"],
        width: int,
        sizes: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        repeats: int,
        depths: tuple[int, int] = (2, 4),
    ) -> None:
        self.kind, self.width = kind, width
        self.points: list[tuple[int, int, float, float]] = []
        for depth in depths:

            def make(depth: int = depth) -> nn.Module:
                return Stack(depth, width) if kind == "dense" else ExpertStack(depth, width, None)

            stack = on_device(make, device, dtype)
            for tokens in sizes:
                x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)

                def forward(x: Tensor = x, stack: nn.Module = stack) -> Tensor:
                    return stack(x).float().pow(2).mean()

                def both(stack: nn.Module = stack, forward: Callable[[], Tensor] = forward) -> None:
                    forward().backward()
                    stack.zero_grad(set_to_none=True)

                ahead, whole = (1e3 * slowest_seconds(f, device, repeats) for f in (forward, both))
                self.points.append((tokens, depth, ahead, whole))

    def at(self, tokens: int) -> Times:
        """By the lines through the measured points, ms."""
        by_size: dict[int, list[tuple[int, float, float]]] = {}
        for size, depth, ahead, whole in self.points:
            by_size.setdefault(size, []).append((depth, ahead, whole - ahead))
        columns: list[tuple[int, Times]] = []
        for size, ((d0, f0, b0), (d1, f1, b1)) in sorted(by_size.items()):
            f, b = (f1 - f0) / (d1 - d0), (b1 - b0) / (d1 - d0)
            columns.append((size, (f, b, f0 - d0 * f, b0 - d0 * b)))
        (s0, low), (s1, high) = columns
        share = (tokens - s0) / (s1 - s0)
        f, b, lf, lb = (p + share * (q - p) for p, q in zip(low, high, strict=True))
        return f, b, lf, lb


def predict_ms(case: Case, times: Times, cluster: ClusterSpec, dtype: torch.dtype) -> float:
    """The simulator's step time of a case.

    Args:
        case: what is run.
        times: of the block at the case's tokens (for experts: of the joint batch), and of the loss at the case's.
        cluster: with measured tiers.
        dtype: of weights on the wire; gradients travel in float32 when sharded, in `dtype` when replicated.
    """
    world = 1 if case.kind == "alone" else cluster.num_gpus
    params = 8 * case.width**2
    expert = case.kind == "expert"
    forward, backward, loss_forward, loss_backward = times
    layers = tuple(
        LayerProfile(
            name=f"block{i}",
            params=params * (world if expert else 1),
            flops=2.0 * params * case.tokens,
            # The loss belongs to the last block.
            forward_us=1e3 * (forward + (loss_forward if i == case.depth - 1 else 0.0)),
            backward_us=1e3 * (backward + (loss_backward if i == case.depth - 1 else 0.0)),
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
        gradient_bytes=4 if case.kind == "shard" else dtype.itemsize,
        optimizer_us_per_million=0.0,
        law=LengthLaw(name="uniform", max_len=1),
    )
    plan = ParallelPlan.for_world(world, shard=world if case.kind == "shard" else 1, expert=world if expert else None)
    config = SimulationConfig(balance="none", overlap_exchange=False)
    return simulate(plan, model, cluster.resized(world), config, check_memory=False).step_us / 1e3


def measure_case(case: Case, device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    """The measured step time of a case, ms."""
    world = dist.get_world_size()
    x = torch.randn(case.tokens, case.width, device=device, dtype=dtype, requires_grad=True)
    torch.manual_seed(0)
    if case.kind == "expert":
        model: nn.Module = on_device(lambda: ExpertStack(case.depth, case.width, dist.group.WORLD), device, dtype)
    elif case.kind == "alone":
        model = on_device(lambda: Stack(case.depth, case.width), device, dtype)
    else:
        stored = torch.float32 if case.kind == "shard" else dtype
        model = on_device(lambda: Stack(case.depth, case.width), device, stored)
        plan = ParallelPlan.for_world(world, shard=world if case.kind == "shard" else 1)
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
    calibrate_tokens: Sequence[int] = (4096, 28672),
    validate_tokens: Sequence[int] = (6144, 12288),
    depth: int = 6,
    repeats: int = 9,
    report: Callable[[Sequence[ErrorRow]], None] = lambda rows: None,
) -> tuple[list[ErrorRow], ClusterSpec]:
    """Calibrate, predict, measure; every rank of the world calls it and gets the same rows but for rounding.

    Args:
        device: of this rank.
        widths, calibrate_tokens, validate_tokens, depth: of the blocks.
        repeats: timed steps per case.
        report: called with every new row, so that a run that is cut off leaves what it has.

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
    kinds: tuple[Kind, ...] = ("alone",) if world == 1 else ("alone", "shard", "replica", "expert")
    for width in widths:
        layers = {"dense": LayerTimes("dense", width, calibrate_tokens, device, dtype, repeats)}
        if "expert" in kinds:
            layers["expert"] = LayerTimes("expert", width, calibrate_tokens, device, dtype, repeats)
        for layer in layers.values():
            for tokens, at_depth, _, whole in layer.points:
                f, b, lf, lb = layer.at(tokens)
                config = f"{layer.kind} blocks {at_depth}x{width} tokens {tokens}"
                rows.append(error_row(config, "calibrate", at_depth * (f + b) + lf + lb, whole, num_gpus=1))
                report(rows[-1:])
        for tokens in validate_tokens:
            for kind in kinds:
                case = Case(kind=kind, depth=depth, width=width, tokens=tokens)
                layer = layers["expert" if kind == "expert" else "dense"]
                # An expert sees the joint batch; each rank runs one expert.
                block, loss = layer.at(tokens * (world if kind == "expert" else 1)), layer.at(tokens)
                predicted = predict_ms(case, (*block[:2], *loss[2:]), cluster, dtype)
                measured = measure_case(case, device, dtype, repeats)
                rows.append(error_row(case.name, "validate", predicted, measured, 1 if kind == "alone" else world))
                report(rows[-1:])
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return rows, cluster


def error_row(
    config: str, split: Literal["calibrate", "validate"], predicted: float, measured: float, num_gpus: int
) -> ErrorRow:
    """A row whose error is computed."""
    return ErrorRow(
        config=config,
        split=split,
        predicted_ms=predicted,
        measured_ms=measured,
        error_pct=100 * (predicted - measured) / measured,
        num_gpus=num_gpus,
    )


def write_errors(path: Path, rows: Sequence[ErrorRow], same: Mapping[str, object]) -> None:
    """Put rows into simulator_error.csv; rows of other configurations stay.

    Args:
        path: of the file.
        rows: new.
        same: columns that all rows share, from `measured_rows.stamp`.
    """
    found = [
        {**same, **dataclasses.asdict(r), "ms": r.measured_ms, "num_gpus": r.num_gpus, "bwd_factor": 2} for r in rows
    ]
    merge_rows(path, ERROR_COLUMNS, found, key=("config", "num_gpus", "gpu"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run under torchrun with one process per GPU; writes simulator_error.csv and cluster.toml."""
    parser = argparse.ArgumentParser(prog="python -m gemworks.parallel.validate", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        parser.error(
            "needs CUDA and torchrun: torchrun --nproc-per-node 2 -m gemworks.parallel.validate --out docs/measured"
        )
    device = start_nccl()
    lead, world = dist.get_rank() == 0, dist.get_world_size()

    def report(rows: Sequence[ErrorRow]) -> None:
        if lead:
            write_errors(args.out / "simulator_error.csv", rows, stamp("gemworks.parallel.validate", world))
            for r in rows:
                text = f"{r.config:36} {r.split:9} {r.predicted_ms:9.3f} {r.measured_ms:9.3f} {r.error_pct:+7.2f} %"
                print(text, flush=True)

    rows, cluster = validate(device, report=report)
    if lead:
        cluster.to_toml(args.out / f"cluster_x{world}.toml")
        errors = sorted(abs(r.error_pct) for r in rows if r.split == "validate")
        print(f"validate: median {statistics.median(errors):.2f} %, worst {errors[-1]:.2f} %")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
