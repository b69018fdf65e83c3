"""Processes in the hosts of an emulated network, and what each of them runs: a GEM-like step under a given layout."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gemworks.parallel.cluster import ClusterSpec, Tier
from gemworks.parallel.embeddings import FeatureSpec, FullyShardedEmbeddings
from gemworks.parallel.emulated_network import INTERFACE, EmulatedNetwork, enter_namespace
from gemworks.parallel.experts import EnsembleExperts
from gemworks.parallel.fsdp import FsdpPolicy, apply_fsdp
from gemworks.parallel.layout import Layout
from gemworks.parallel.lengths import LengthLaw
from gemworks.parallel.measure import slowest_seconds
from gemworks.parallel.meshes import Meshes
from gemworks.parallel.placement import Placement, Split
from gemworks.parallel.plan import ParallelPlan, View
from gemworks.parallel.profile import LayerProfile, ModelProfile
from gemworks.parallel.sparse_optim import RowWiseAdagrad
from gemworks.parallel.splits import layout_of_splits
from gemworks.parallel.stacks import Block
from gemworks.parallel.tables import TableSpec
from torch import Tensor, nn

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Sizes of the step: tables, a projection, then dense blocks with an ensemble of experts between them.

    Attributes:
        width, num_blocks, num_experts: of the dense part; an ensemble after every block but the last.
        samples: rows of the dense part per rank.
        num_rows, dim: of the one table.
        ids_per_sample: looked up and summed; all ids of a rank's batch are different.
    """

    width: int = 256
    num_blocks: int = 3
    num_experts: int = 2
    samples: int = 32
    num_rows: int = 32768
    dim: int = 32
    ids_per_sample: int = 128

    @property
    def num_ids(self) -> int:
        return self.samples * self.ids_per_sample


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan in a place.

    Attributes:
        name: of the configuration.
        plan: of the world.
        splits: where the axes lie on the tiers.
    """

    name: str
    plan: ParallelPlan
    splits: Mapping[View, Mapping[str, Split]]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What was measured of a job.

    Attributes:
        name: of the job.
        ms: median step of the slowest rank.
        bytes_by_tier: sent by all ranks in one step, headers taken off.
        framing_share: headers in all bytes that the links carried.
    """

    name: str
    ms: float
    bytes_by_tier: Mapping[Tier, float]
    framing_share: float


class EmulatedStep(nn.Module):
    """One forward and backward with table update; made for a layout by `build`."""

    def __init__(self, shape: StepShape, expert_group: dist.ProcessGroup | None) -> None:
        super().__init__()

        def make(i: int) -> nn.Module:
            torch.manual_seed(100 + i)
            return Block(shape.width)

        torch.manual_seed(0)
        self.bottom = nn.Linear(shape.dim, shape.width, bias=False)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.num_blocks))
        self.experts = nn.ModuleList(
            EnsembleExperts(make, shape.num_experts, expert_group) for _ in range(shape.num_blocks - 1)
        )

    def forward(self, rows: Tensor) -> Tensor:
        x = self.bottom(rows)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i < len(self.experts):
                experts = self.experts[i]
                assert isinstance(experts, EnsembleExperts)
                x = experts(x, [x.shape[0]] * experts.size)
        return x


def table_batch(shape: StepShape, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Ids that are all different and fall on every block of rows alike, so that what travels is exactly known."""
    ids = (torch.arange(shape.num_ids) * (shape.num_rows // shape.num_ids) + rank) % shape.num_rows
    order = torch.randperm(shape.num_ids, generator=torch.Generator().manual_seed(rank))
    offsets = torch.arange(0, shape.num_ids + 1, shape.ids_per_sample)
    return {"ids": (ids[order], offsets)}


def build_step(shape: StepShape, plan: ParallelPlan, meshes: Meshes) -> Callable[[], object]:
    """The step as a function without arguments: lookup, forward, backward, table update and its publication."""
    tables = [TableSpec(name="t", num_rows=shape.num_rows, dim=shape.dim, sharding="row_wise")]
    features = [FeatureSpec(name="ids", table="t", pooling="sum")]
    emb = FullyShardedEmbeddings(tables, features, meshes, RowWiseAdagrad(lr=0.01))
    model = EmulatedStep(shape, meshes.group("experts", "expert"))
    # torch's FSDP waits for its collectives on the CPU, so there is nothing to prefetch.
    blocks = ["bottom", *(f"blocks.{i}" for i in range(shape.num_blocks))]
    apply_fsdp(model, meshes, blocks, FsdpPolicy(prefetch=False))
    batch = table_batch(shape, meshes.rank)

    def step() -> None:
        loss = model(emb(batch)["ids"]).pow(2).mean()
        loss.backward()
        model.zero_grad(set_to_none=True)
        emb.settle()

    return step


def step_profile(shape: StepShape, times: Mapping[str, float] | None = None) -> ModelProfile:
    """The step as the simulator sees it.

    Args:
        shape: of the step.
        times: ms of "block" and "expert" forward and backward, "lookup" and "update"; None: from FLOPs.
    """
    weights = 8 * shape.width**2
    t = times or {}

    def us(name: str) -> float | None:
        return 1e3 * t[name] if name in t else None

    def block(name: str) -> LayerProfile:
        return LayerProfile(
            name=name,
            params=weights,
            flops=2.0 * weights * shape.samples,
            forward_us=us("block forward"),
            backward_us=us("block backward"),
            length_share=0.0,
        )

    layers = [
        LayerProfile(
            name="bottom",
            params=shape.dim * shape.width,
            flops=2.0 * shape.dim * shape.width * shape.samples,
            forward_us=0.0,
            backward_us=0.0,
            length_share=0.0,
        )
    ]
    for i in range(shape.num_blocks):
        layers.append(block(f"block{i}"))
        if i < shape.num_blocks - 1:
            layers.append(
                LayerProfile(
                    name=f"expert{i}",
                    params=shape.num_experts * (weights + 1),
                    flops=2.0 * shape.num_experts * weights * shape.samples,
                    forward_us=us("expert forward"),
                    backward_us=us("expert backward"),
                    length_share=0.0,
                    exchange_bytes=4.0 * shape.samples * shape.width,
                    kind="expert",
                )
            )
    return ModelProfile(
        name="emulated step",
        layers=tuple(layers),
        tables=(TableSpec(name="t", num_rows=shape.num_rows, dim=shape.dim, sharding="row_wise"),),
        ids_per_batch=shape.num_ids,
        bytes_per_row=4.0 * shape.dim,
        samples_per_rank=shape.samples,
        num_experts=shape.num_experts,
        weight_bytes=4.0,
        gradient_bytes=4.0,
        optimizer_us_per_million=0.0,
        lookup_us=us("lookup"),
        update_us=us("update"),
        law=LengthLaw(name="uniform", max_len=1),
        sources="layers timed alone, all processes at once",
    )


def time_layers(shape: StepShape, repeats: int = 7) -> dict[str, float]:
    """Layers without communication, all ranks at once: ms of the slowest; the simulator's only view of compute."""
    found: dict[str, float] = {}
    x = torch.randn(shape.samples, shape.width, requires_grad=True)
    torch.manual_seed(0)
    for name, module in (
        ("block", Block(shape.width)),
        ("expert", EnsembleExperts(lambda i: Block(shape.width), shape.num_experts)),
    ):

        def forward(m: nn.Module = module) -> object:
            return m(x)

        def both(m: nn.Module = module) -> None:
            m(x).pow(2).mean().backward()
            m.zero_grad(set_to_none=True)

        ahead, whole = (1e3 * slowest_seconds(f, CPU, repeats) for f in (forward, both))
        found |= {f"{name} forward": ahead, f"{name} backward": max(whole - ahead, 0.0)}
    weight = torch.randn(shape.num_rows, shape.dim)
    ids, offsets = table_batch(shape, dist.get_rank())["ids"]
    grad, state = torch.randn(shape.num_ids, shape.dim), torch.zeros(shape.num_rows)

    def lookup() -> None:
        unique, inverse = torch.unique(ids, return_inverse=True)
        rows = weight[unique][inverse]
        sample = torch.repeat_interleave(torch.arange(shape.samples), offsets.diff())
        rows.new_zeros(shape.samples, shape.dim).index_add(0, sample, rows)

    def update() -> None:
        rows, inverse = torch.unique(ids, return_inverse=True)
        total = torch.zeros_like(grad).index_add_(0, inverse, grad)
        RowWiseAdagrad(lr=0.01).update(weight, state, rows, total, 1)

    found |= {n: 1e3 * slowest_seconds(f, CPU, repeats) for n, f in (("lookup", lookup), ("update", update))}
    return found


def run_job(
    rank: int, network: EmulatedNetwork, cluster: ClusterSpec, shape: StepShape, job: Job, repeats: int
) -> StepResult:
    """Measure a job; every rank calls it, rank 0 reads the counters."""
    layout = layout_of_splits(job.plan, job.splits, cluster)
    meshes = meshes_of(layout)
    step = build_step(shape, job.plan, meshes)
    step()
    dist.barrier()
    before = network.counters() if rank == 0 else None
    seconds = slowest_seconds(step, CPU, repeats, num_warmup=1)
    dist.barrier()
    found: Mapping[Tier, float] = {}
    framing = 0.0
    if before is not None:
        after = network.counters()
        found, framing = after.minus(before, repeats + 1), after.framing_share
    return StepResult(name=job.name, ms=1e3 * seconds, bytes_by_tier=found, framing_share=framing)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a rank stopped.

    Attributes:
        steps: that it finished before.
        message: of the error.
        at_s: when, on this machine's monotonic clock.
    """

    steps: int
    message: str
    at_s: float


def step_until_failure(
    rank: int, cluster: ClusterSpec, shape: StepShape, job: Job, timeout_s: float, most_s: float
) -> Failure | None:
    """Run steps until a collective fails; None if none did within `most_s` seconds.

    Args:
        rank: of the world.
        cluster, shape, job: what runs where.
        timeout_s: of every process group.
        most_s: to wait for a failure.
    """
    layout = layout_of_splits(job.plan, job.splits, cluster)
    step = build_step(shape, job.plan, meshes_of(layout, timedelta(seconds=timeout_s)))
    end = time.monotonic() + most_s
    steps = 0
    while time.monotonic() < end:
        try:
            step()
        except RuntimeError as error:
            return Failure(steps=steps, message=str(error), at_s=time.monotonic())
        steps += 1
    return None


def meshes_of(layout: Layout, timeout: timedelta = timedelta(seconds=60)) -> Meshes:
    """Process groups of a layout that somebody else has chosen."""
    return Meshes(Placement(layout=layout, views={}), "cpu", timeout)


def launch(
    network: EmulatedNetwork,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    timeout_s: float = 300.0,
    collective_timeout_s: float = 60.0,
) -> list[tuple[bool, Any]]:
    """Run `function(rank, *args)` on every rank, each in its host's namespace, with gloo over the emulated links.

    Args:
        network: up.
        function: importable by name.
        args: picklable.
        timeout_s: for everything.
        collective_timeout_s: of the world's process group.

    Returns:
        By rank: (True, result), or (False, the traceback).

    Raises:
        TimeoutError: a rank did not answer.
    """
    import multiprocessing
    import queue as queues

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "gemworks.parallel.emulated_run"])
    queue = context.Queue()
    world = network.world_size
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_child,
                args=(function, r, network, f"{folder}/store", collective_timeout_s, tuple(args), queue),
                daemon=True,
            )
            for r in range(world)
        ]
        for p in processes:
            p.start()
        found: dict[int, tuple[bool, Any]] = {}
        try:
            while len(found) < world:
                # Once one has failed, the others have their collectives' time-out to notice.
                failed = any(not good for good, _ in found.values())
                rank, good, value = queue.get(timeout=collective_timeout_s + 30 if failed else timeout_s)
                found[rank] = (good, value)
        except queues.Empty:
            raise TimeoutError(
                f"ranks {sorted(set(range(world)) - set(found))} did not answer in {timeout_s} s"
            ) from None
        finally:
            for p in processes:
                if len(found) < world:
                    p.terminate()
                p.join(20)
    return [found[r] for r in range(world)]


def _child(
    function: Callable[..., Any],
    rank: int,
    network: EmulatedNetwork,
    store: str,
    timeout_s: float,
    args: tuple[Any, ...],
    queue: Any,
) -> None:
    import warnings

    # torch 2.13 renames collectives that 2.11 has under the old name alone.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.*")
    try:
        enter_namespace(network.host_of_rank(rank))
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        torch.set_num_threads(1)
        # The store is a file: meeting costs no byte on the links.
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=network.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        queue.put((rank, True, function(rank, *args)))
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
