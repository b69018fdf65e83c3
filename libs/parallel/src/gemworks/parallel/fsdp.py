"""2D FSDP on torch's FSDP2: weights sharded inside a group, the group replicated, with an explicit policy.

The model knows nothing of it: `apply_fsdp` is applied from outside, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from gemworks.parallel._check import kind, whole
from gemworks.parallel.experts import ExpertExchange
from gemworks.parallel.meshes import Meshes
from gemworks.parallel.replicas import GradientAverager, check_equal_replicas
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class FsdpPolicy:
    """What is sharded, kept and fetched when.

    Attributes:
        min_shard_numel: parameters with fewer elements are replicated: a shard of them would be all latency. 0: shard
            all.
        keep_bytes: gathered weights that may stay between forward and backward, smallest blocks first; the last block
            always stays because its backward follows at once. The sizes are those of the blocks given, in
            `param_dtype`.
        param_dtype, reduce_dtype: of gathered weights and of gradient reduction; None: as stored.
        prefetch: gather the next block while one runs, in forward and in backward.
        all_gather: FSDP2 all-gather to use instead of the process group's (for example on copy engines).
        wrap_weight: called with (name, parameter) before sharding; returns a tensor that implements FSDP2's
            `fsdp_pre_all_gather` / `fsdp_post_all_gather` (for example a quantising weight), or None to leave it.
    """

    min_shard_numel: int = 0
    keep_bytes: int = 0
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    prefetch: bool = True
    all_gather: Any = None
    wrap_weight: Callable[[str, nn.Parameter], Tensor | None] | None = None

    def __post_init__(self) -> None:
        whole("min_shard_numel", self.min_shard_numel, 0)
        whole("keep_bytes", self.keep_bytes, 0)
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if not isinstance(value, torch.dtype | None):
                raise ValueError(f"{name}: got {value!r}, expected a torch dtype such as torch.bfloat16, or None")


@dataclass(frozen=True, kw_only=True)
class FsdpReport:
    """What `apply_fsdp` did.

    Attributes:
        blocks: block -> "kept" (gathered weights stay until its backward) or "resharded".
        block_bytes: gathered bytes of each block.
        replicated: parameters averaged instead of sharded.
        experts: expert modules and what they were applied on.
    """

    blocks: Mapping[str, Literal["kept", "resharded"]]
    block_bytes: Mapping[str, int]
    replicated: tuple[str, ...]
    experts: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """A table, stable."""
        lines = [f"{'block':40} {'MiB':>9}  after forward"]
        lines += [f"{n:40} {self.block_bytes[n] / MIB:>9.2f}  {how}" for n, how in self.blocks.items()]
        lines.append(f"replicated: {', '.join(self.replicated) or '-'}")
        lines += [f"experts {n}: {how}" for n, how in self.experts.items()]
        return "\n".join(lines)


def apply_fsdp(
    model: nn.Module,
    meshes: Meshes,
    blocks: Sequence[str],
    policy: FsdpPolicy | None = None,
    *,
    ignore: Sequence[nn.Parameter] = (),
    check: bool = True,
) -> FsdpReport:
    """Shard a model in place.

    Every gradient becomes the mean over all ranks of the world; for `EnsembleExperts` that mean includes the joint
    batch.

    Args:
        model: on its device, equal on all ranks (experts: on the ranks that hold the same experts).
        meshes: of the plan; dense weights go on {replica, shard}, local experts on {replica, expert_shard}.
        blocks: names of the submodules that are gathered as a unit, in the order in which forward runs them.
        policy: defaults if None.
        ignore: parameters that others handle (embedding tables).
        check: compare replicas first.

    Returns:
        A report.

    Raises:
        ValueError: an unknown block, one named twice, or replicas that start different.
    """
    kind("model", model, nn.Module)
    kind("meshes", meshes, Meshes, "make them with build_meshes")
    rules = policy or FsdpPolicy()
    modules = dict(model.named_modules())
    _check_blocks(blocks, modules)
    experts = {n: m for n, m in modules.items() if isinstance(m, ExpertExchange)}
    expert_params = _expert_ids(experts)
    ignored = {id(p) for p in ignore}
    dense = [(n, p) for n, p in model.named_parameters() if id(p) not in expert_params | ignored]
    if check:
        check_equal_replicas(dense, None)
        _check_experts(experts, meshes)
    if rules.wrap_weight is not None:
        _wrap_weights(model, rules.wrap_weight, ignored)
        expert_params = _expert_ids(experts)
        dense = [(n, p) for n, p in model.named_parameters() if id(p) not in expert_params | ignored]

    how: dict[str, str] = {}
    for name, module in experts.items():
        how[name] = _apply_experts(module, meshes, rules)
    # FSDP has put its own parameters in place of these.
    expert_params |= _expert_ids(experts)

    plan = meshes.layout.plan
    small = [(n, p) for n, p in dense if p.numel() < rules.min_shard_numel] if plan.dense.shard > 1 else list(dense)
    small_ids = {id(p) for _, p in small}
    skip = {p for p in model.parameters() if id(p) in small_ids | expert_params | ignored}
    sizes: dict[str, int] = {}
    kept: dict[str, Literal["kept", "resharded"]] = {}
    if plan.dense.shard > 1:
        sizes = {b: _gathered_bytes(modules[b], {id(p) for p in skip}, rules) for b in blocks}
        kept = _reshard_plan(blocks, sizes, rules.keep_bytes)
        mesh = meshes.mesh("dense")
        assert mesh is not None
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": _mixed(rules), "ignored_params": skip}
        for b in blocks:
            if sizes[b]:
                fully_shard(modules[b], reshard_after_forward=kept[b] == "resharded", **options)
        fully_shard(model, reshard_after_forward=False, **options)
        _set_prefetch([modules[b] for b in blocks], rules)
        _set_all_gather(model, rules)
    if small and plan.world_size > 1:
        assert dist.group.WORLD is not None
        model.gradient_averager = GradientAverager(model, [p for _, p in small], dist.group.WORLD)  # type: ignore[assignment]
    return FsdpReport(blocks=kept, block_bytes=sizes, replicated=tuple(n for n, _ in small), experts=how)


def _check_blocks(blocks: Sequence[str], modules: Mapping[str, nn.Module]) -> None:
    if isinstance(blocks, str):
        raise ValueError(f"blocks: got {blocks!r}, expected a list of names")
    if len(set(blocks)) != len(blocks):
        raise ValueError(f"blocks: got {list(blocks)}, expected each name once")
    unknown = [b for b in blocks if b not in modules]
    if unknown:
        known = sorted(n for n in modules if n)[:12]
        raise ValueError(f"blocks: got {unknown}, expected names of submodules such as {known}")


def _expert_ids(experts: Mapping[str, ExpertExchange]) -> set[int]:
    return {id(p) for m in experts.values() for p in m.experts_here().parameters()}


def _apply_experts(module: ExpertExchange, meshes: Meshes, rules: FsdpPolicy) -> str:
    plan, experts = meshes.layout.plan.experts, module.experts_here()
    if plan is None:
        raise ValueError("model: has EnsembleExperts but the plan has no experts view; give ParallelPlan experts")
    if plan.expert_shard > 1:
        mesh = meshes.mesh("experts", ("replica", "expert_shard"))
        assert mesh is not None
        fully_shard(experts, mesh=mesh, mp_policy=_mixed(rules), reshard_after_forward=True)
        _set_all_gather(experts, rules)
        return f"FSDP over {plan.expert_shard} x {plan.replica} replicas"
    group = meshes.group("experts", "replica")
    if group is not None:
        averager = GradientAverager(experts, list(experts.parameters()), group)
        experts.gradient_averager = averager  # type: ignore[assignment]
        return f"averaged over {plan.replica} replicas"
    return "one copy"


def _check_experts(experts: Mapping[str, ExpertExchange], meshes: Meshes) -> None:
    for name, module in experts.items():
        for axis in ("expert_shard", "replica"):
            group = meshes.group("experts", axis)
            if group is not None:
                check_equal_replicas(((f"{name}: {n}", p) for n, p in module.experts_here().named_parameters()), group)


def _wrap_weights(model: nn.Module, wrap: Callable[[str, nn.Parameter], Tensor | None], ignored: set[int]) -> None:
    for prefix, module in model.named_modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if id(p) in ignored:
                continue
            new = wrap(f"{prefix}.{name}" if prefix else name, p)
            if new is not None:
                setattr(module, name, nn.Parameter(new, requires_grad=p.requires_grad))


def _mixed(rules: FsdpPolicy) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=rules.param_dtype, reduce_dtype=rules.reduce_dtype)


def _gathered_bytes(module: nn.Module, skip: set[int], rules: FsdpPolicy) -> int:
    total = 0
    for p in module.parameters():
        if id(p) not in skip:
            total += p.numel() * (rules.param_dtype or p.dtype).itemsize
    return total


def _reshard_plan(
    blocks: Sequence[str], sizes: Mapping[str, int], keep_bytes: int
) -> dict[str, Literal["kept", "resharded"]]:
    kept: set[str] = set(blocks[-1:])
    left = keep_bytes
    for b in sorted(blocks[:-1], key=lambda b: (sizes[b], blocks.index(b))):
        if sizes[b] <= left:
            kept.add(b)
            left -= sizes[b]
    return {b: "kept" if b in kept else "resharded" for b in blocks}


def _set_prefetch(blocks: Sequence[nn.Module], rules: FsdpPolicy) -> None:
    if not rules.prefetch:
        return
    sharded = [b for b in blocks if isinstance(b, FSDPModule)]
    for before, after in pairwise(sharded):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def _set_all_gather(root: nn.Module, rules: FsdpPolicy) -> None:
    if rules.all_gather is None:
        return
    for m in root.modules():
        if isinstance(m, FSDPModule):
            m.set_custom_all_gather(rules.all_gather)
