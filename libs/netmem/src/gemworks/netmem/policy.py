"""Apply a plan: each region of a model treats its activations as its choice says.

A region is a module. In eager, recompute is activation checkpointing (whole, or selective: products and attention are
kept and the cheap rest is recomputed). Under `torch.compile` a region is one compiled block and recompute is the
partitioner's memory budget for it: 1.0 keep, 0.0 recompute, 0.5 the half of it; `recompute@0.25` names any other.
Quantise and offload are saved-tensor hooks around either kind; `quantise_fused` is in the compiled code itself, and
`quantise_fused@0.5` is both at once: the half of the activations, coded.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gemworks.netmem.budget import (
    CHOICES,
    KEEP,
    OFFLOAD,
    QUANTISE,
    QUANTISE_FUSED,
    QUANTISE_OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_CHEAP,
    Pace,
    Plan,
)
from gemworks.netmem.checks import check_all, check_kind, check_number
from gemworks.netmem.codec import Codec, get_codec
from gemworks.netmem.offload import OffloadEngine
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Share of the partitioner's default memory that a compiled region keeps.
PARTITIONER_BUDGETS = {KEEP: 1.0, RECOMPUTE_CHEAP: 0.5, RECOMPUTE: 0.0, QUANTISE_FUSED: 1.0}
# Graphs of one code object that dynamo may hold while a policy is on or is profiled: one per choice and kind of region.
# Its own limit, 8, is a guard against code that never stops recompiling.
MAX_GRAPHS = 128
# Results that selective recomputation keeps: what costs matrix products to make again.
EXPENSIVE_OPS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(torch.ops.aten, name)
)


def has_region_budget() -> bool:
    """Does this torch have `torch.autograd.graph.region_activation_memory_budget` (2.13 has it, 2.11 does not)?"""
    return hasattr(torch.autograd.graph, "region_activation_memory_budget")


def explain_compile_budget() -> str:
    """How `compile_with_budget` passes a region's budget on this torch."""
    if has_region_budget():
        return "torch.autograd.graph.region_activation_memory_budget around the region's forward, inside its graph"
    return "torch._functorch.config.activation_memory_budget, set by the backend that compiles the region's own graph"


def compile_with_budget(
    forward: Callable[..., Any], budget: float, *, quantise: bool = False, **compile_kwargs: Any
) -> Callable[..., Any]:
    """Compile a region as one graph of its own, with its own activation memory budget.

    Args:
        forward: the region.
        budget: 0..1: share of the activations that the partitioner may keep, compared with its default strategy.
        quantise: keep as FP8 what the graph saves for backward and can decode for nothing (`fused`); lossy.
        compile_kwargs: for `torch.compile`. `fullgraph=True` is the default, because a budget belongs to a whole graph.

    Raises:
        ValueError: a budget outside 0..1.
    """
    if not callable(forward):
        raise ValueError(f"forward: expected the region's forward, got {forward!r}")
    check_number("budget", budget)
    if budget > 1.0:
        raise ValueError(f"budget: expected within 0..1, got {budget}")
    kwargs: dict[str, Any] = {"fullgraph": True} | compile_kwargs
    if quantise or not has_region_budget():
        kwargs["backend"] = _backend(budget, quantise, kwargs.get("backend"))
        return torch.compile(forward, **kwargs)

    # a closure's float turns symbolic as soon as the same code is compiled with another one, which an annotation can't
    # be; a string is a constant
    text = repr(float(budget))

    def annotated(*args: Any, **kw: Any) -> Any:
        with torch.autograd.graph.region_activation_memory_budget(float(text)):
            return forward(*args, **kw)

    return torch.compile(annotated if budget != 1.0 else forward, **kwargs)


def room_for_graphs() -> contextlib.AbstractContextManager[Any]:
    """Lets dynamo hold a graph per choice of the same code; with `fullgraph` its usual limit is an error."""
    from torch._dynamo import config

    return config.patch(recompile_limit=max(config.recompile_limit, MAX_GRAPHS))  # type: ignore[attr-defined]


@functools.cache
def _backend(budget: float, quantise: bool, inner: str | Callable[..., Any] | None) -> Callable[..., Any]:
    """A compiler backend that partitions under a budget.

    One object per setting: dynamo reuses a graph for every region of the same code and shapes as long as the backends
    are equal, and the partitioner's setting is no part of that test. With one backend for all, a region would get a
    graph compiled under another region's budget.
    """

    def compile_region(graph: Any, example_inputs: Any, **options: Any) -> Any:
        from torch._functorch import config

        with config.patch(activation_memory_budget=budget):  # type: ignore[attr-defined]
            return _inner_compiler(inner, options, quantise)(graph, example_inputs)

    return compile_region


def _inner_compiler(
    inner: str | Callable[..., Any] | None, options: Mapping[str, Any], quantise: bool = False
) -> Callable[..., Any]:
    if inner not in (None, "inductor") and not quantise:
        found = torch._dynamo.lookup_backend(inner)
        return functools.partial(found, **options) if options else found
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    mode, patches = options.get("mode"), dict(options.get("options") or {})
    if mode is not None and mode != "default":
        patches = list_mode_options(mode) | patches
    if quantise:
        from gemworks.netmem.fused import coding_compiler

        return coding_compiler(inner, patches)
    return functools.partial(compile_fx, config_patches=patches) if patches else compile_fx


def partitioner_budget(choice: str) -> float | None:
    """The partitioner's budget that a choice stands for, or None for other choices.

    Raises:
        ValueError: `recompute@x` or `quantise_fused@x` with an x that is no number within 0..1.

    >>> [partitioner_budget(c) for c in ("recompute@0.25", "quantise_fused@0.5", "keep", "offload")]
    [0.25, 0.5, 1.0, None]
    """
    name, at, text = choice.partition("@")
    if not at or name not in (RECOMPUTE, QUANTISE_FUSED):
        return PARTITIONER_BUDGETS.get(choice)
    try:
        budget = float(text)
    except ValueError:
        budget = -1.0
    if not 0.0 <= budget <= 1.0:
        raise ValueError(f"choice: {choice!r}: expected a budget within 0..1 after '@', got {text!r}")
    return budget


def selective_contexts() -> Any:
    """`context_fn` for torch's checkpoint: keep the results of `EXPENSIVE_OPS`, recompute the rest."""

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def treated_forward(
    module: nn.Module,
    forward: Callable[..., Any],
    choice: str,
    *,
    engine: OffloadEngine | None,
    codec: str | Codec | None,
    compile_kwargs: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """The forward of a region under a choice. See `apply_policy`."""
    check_kind("choice", choice, str)
    budget = partitioner_budget(choice)
    if budget is None and choice not in CHOICES:
        raise ValueError(
            f"choice: got {choice!r}, expected one of {(*CHOICES, QUANTISE_FUSED)}, 'recompute@0.25' or "
            f"'quantise_fused@0.5'"
        )
    if choice in (QUANTISE, OFFLOAD, QUANTISE_OFFLOAD) and engine is None:
        raise ValueError(f"engine: choice {choice!r} needs an OffloadEngine, got None")
    if compile_kwargs is not None:
        fused = choice.startswith(QUANTISE_FUSED)
        inner = compile_with_budget(forward, 1.0 if budget is None else budget, quantise=fused, **compile_kwargs)
        if budget is not None:
            return inner
    elif budget is not None and choice not in CHOICES:
        raise ValueError(f"compile_kwargs: choice {choice!r} is made while a region is compiled, got None")
    else:
        inner = forward
    if choice == KEEP:
        return inner
    if choice in (RECOMPUTE, RECOMPUTE_CHEAP):
        extra: dict[str, Any] = {"context_fn": selective_contexts} if choice == RECOMPUTE_CHEAP else {}

        def recomputing(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            # bound before: the region may have keyword arguments of the same names as checkpoint
            run = functools.partial(inner, **kwargs) if kwargs else inner
            return checkpoint(run, *args, use_reentrant=False, **extra)

        return recomputing
    assert engine is not None
    coder = None if choice == OFFLOAD else get_codec(codec or "fp8_row")

    def saving(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        with engine.saving(module, codec=coder, move=choice != QUANTISE, exact_strides=compile_kwargs is not None):
            return inner(*args, **kwargs)

    return saving


def paced_forward(forward: Callable[..., Any], engine: OffloadEngine, pace: Pace) -> Callable[..., Any]:
    """The forward of a region that tells the engine where the step is, whatever the region itself does."""

    def paced(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        start = engine.position
        with engine.paced():
            out = forward(*args, **kwargs)
        end = engine.position
        engine.end_forward(pace.leaving_bytes)

        def begin_backward(grad: torch.Tensor) -> None:
            engine.begin_backward(start, end, pace.returning_bytes, pace.staying_bytes)

        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(begin_backward)
        return out

    return paced


class _Treated:
    """The forward of a region in the place of its own. A copy of the region, a pickled one too, has its own again:
    this one would run the region that was copied.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], had: Callable[..., Any] | None) -> None:
        self._module, self._run, self._had = module, run, had

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _own_forward, (self._module, self._had)


def _own_forward(module: nn.Module, had: Callable[..., Any] | None) -> Callable[..., Any]:
    return had or types.MethodType(type(module).forward, module)


class AppliedPolicy:
    """A policy on a model; `remove()` takes it off again. Also a context manager."""

    def __init__(self, choices: dict[str, str], undo: list[Callable[[], None]]) -> None:
        self.choices = choices
        self._undo = undo

    def remove(self) -> None:
        """Give every region its own forward back. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def find_region(model: nn.Module, name: str) -> nn.Module:
    """The submodule of that name, or a ValueError."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [n for n, _ in model.named_children()]
        raise ValueError(f"regions: the model has no module {name!r}; its children are {known}") from None


def apply_policy(
    model: nn.Module,
    choices: Plan | Mapping[str, str],
    *,
    engine: OffloadEngine | None = None,
    codec: str | Codec | None = None,
    compile_kwargs: Mapping[str, Any] | None = None,
) -> AppliedPolicy:
    """Make regions treat their activations as chosen.

    Args:
        model: the model; its submodules' forwards are wrapped in place.
        choices: a plan, or region (module) name -> choice. With a plan that moves bytes every region tells the engine
            where the step is, and copies keep the plan's pace; without one the engine learns it only from the regions
            that save through it.
        engine: for quantise and offload.
        codec: for quantise; None: FP8 row-wise.
        compile_kwargs: compile every region, with these arguments of `torch.compile`; None: eager.

    Returns:
        A handle that undoes it.

    Raises:
        ValueError: unknown module or choice, a missing engine, regions inside one another.
    """
    check_kind("model", model, nn.Module)
    check_kind("choices", choices, (Plan, Mapping), "solve() makes a plan; or {'layers.0': 'recompute'}")
    if engine is not None:
        check_kind("engine", engine, OffloadEngine)
    if compile_kwargs is not None:
        check_kind("compile_kwargs", compile_kwargs, Mapping, "arguments of torch.compile; {} for its defaults")
    pace: Mapping[str, Pace] = {}
    if isinstance(choices, Plan):
        pace = choices.pace if choices.moved_bytes else {}
        choices = choices.choices
    check_all("choices", choices, str, "names of modules")
    names = sorted(choices)
    for outer in names:
        inside = [n for n in names if n != outer and (n.startswith(outer + ".") or outer == "")]
        if inside:
            raise ValueError(f"choices: region {inside[0]!r} lies inside region {outer!r}; choose one of the two")
    undo: list[Callable[[], None]] = []
    applied = AppliedPolicy(dict(choices), undo)
    try:
        if compile_kwargs is not None:
            room = contextlib.ExitStack()
            undo.append(room.close)
            room.enter_context(room_for_graphs())
        for name, choice in choices.items():
            module = find_region(model, name)
            had, forward = module.__dict__.get("forward"), module.forward
            treated = treated_forward(
                module, forward, choice, engine=engine, codec=codec, compile_kwargs=compile_kwargs
            )
            if engine is not None and name in pace:
                treated = paced_forward(treated, engine, pace[name])
            if treated is forward:
                continue
            module.forward = _Treated(module, treated, had)  # type: ignore[method-assign]

            def restore(module: nn.Module = module, had: Any = had) -> None:
                if had is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = had

            undo.append(restore)
    except BaseException:
        # whatever stopped this, an interrupt too, the model gets its own forwards back
        applied.remove()
        raise
    return applied
