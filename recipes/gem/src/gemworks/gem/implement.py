"""Puts a model on what `config.kernels` and `config.train.compile` say, from outside: quantised linears, compilation,
and what is kept for backward. Names of parameters stay as they are, so checkpoints do too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from gemworks.gem.config import GemConfig
from gemworks.gem.kernels import KernelConfig
from gemworks.gem.model.events import EventTokens, Sequence
from gemworks.gem.model.head import Head
from gemworks.jagged import RopeTables
from torch import nn
from torch._functorch import config as functorch_config

if TYPE_CHECKING:
    from gemworks.precision import Recipe

Backend = str | Callable[..., Any]
INNER: Backend = "inductor"  # the compiler; tests that only look at graphs set another one
ProbedLoss = Callable[[nn.Module], torch.Tensor]
PROBE = "probe"
PROBED = ("fp8_block128", "fp8_wgrad_bf16")  # what a probe chooses from, besides staying as it is
ARENA_BYTES = 8 << 30  # of pinned memory, for what activations move to the host
CPU_ARENA_BYTES = 64 << 20


def implement(model: nn.Module, config: GemConfig, linears: Recipe | None = None) -> None:
    """Converts the linears and compiles, in place.

    Args:
        model: a `Gem`.
        config: of the run.
        linears: what `probe_linears` chose, with `kernels.linears="probe"`.

    Raises:
        ValueError: linears are those that a probe chose, and its choice is not given.
    """
    convert_linears(model, config.kernels, linears)
    if config.kernels.activations != "keep":
        treat_activations(model, config)
    if config.train.compile:
        if config.kernels.compiles_layers:
            compile_layers(model, config.kernels, with_forward=config.kernels.activations == "keep")
        compile_dense(model, config.kernels, with_layers=not config.kernels.compiles_layers)


def convert_linears(model: nn.Module, kernels: KernelConfig, linears: Recipe | None = None) -> None:
    """Linear layers compute as `kernels.linears` says; arguments and errors are those of `implement`."""
    if kernels.linears == PROBE:
        if linears is None:
            raise ValueError(
                "kernels.linears: got 'probe' without what a probe chose (`probe_linears`), expected a recipe such as "
                "'fp8_block128', or the file linears.toml in the run's folder, which says it"
            )
        from gemworks.precision import convert

        convert(model, linears, filter=_takes(kernels))
    elif kernels.linears != "bf16":
        quantise_linears(model, kernels)


def quantise_linears(model: nn.Module, kernels: KernelConfig) -> str:
    """Linear layers of at least `linears_min_features` compute by gemworks.precision; returns its report, a line each.

    The head stays as it is: its logits are what the loss sees. So do batched experts, whose weights one product takes.
    """
    from gemworks.precision import convert

    return str(convert(model, _recipe(kernels.linears, kernels), filter=_takes(kernels)))


def probe_linears(model: nn.Module, kernels: KernelConfig, loss_of: ProbedLoss) -> Recipe:
    """Of each linear layer that of `PROBED` which is exact enough and fastest on the loss's batch, or bf16.

    The batch is a whole one: which product is faster depends on its rows. Random numbers that it draws are drawn again
    afterwards: a run that goes on does not probe, and draws the same.
    """
    from gemworks.precision import probe

    device = next(model.parameters()).device
    with warnings.catch_warnings(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        warnings.simplefilter("ignore")  # candidates that a device is slow at say so, which is what is measured here
        candidates = tuple(_recipe(name, kernels) for name in PROBED)
        return probe(model, [None], lambda of, _: loss_of(of), candidates=candidates).recipe


def explain_linears(model: nn.Module) -> str:
    """Which linear layers compute by which recipe; the others are plain.

    >>> explain_linears(nn.Sequential(nn.Linear(8, 8)))
    'no layer but bf16'
    """
    from gemworks.precision import MXLinear

    by_recipe: dict[str, list[str]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, MXLinear) and not layer.recipe.is_bf16:
            by_recipe.setdefault(layer.recipe.name, []).append(name)
    texts = [f"{recipe} in {len(names)} layers ({', '.join(names)})" for recipe, names in by_recipe.items()]
    return "; ".join(texts) or "no layer but bf16"


def _recipe(name: str, kernels: KernelConfig) -> Recipe:
    from gemworks.precision import recipe

    return replace(
        recipe(name),
        min_features=kernels.linears_min_features,
        hadamard_size=32 if kernels.linears_hadamard else 0,
        stochastic_gradients=kernels.linears_stochastic,
    )


def _takes(kernels: KernelConfig) -> Callable[[str, nn.Module], bool]:
    batched = kernels.experts == "batched"

    def takes(name: str, layer: nn.Module) -> bool:
        return not name.startswith("head.") and not (batched and ".experts." in f".{name}")

    return takes


def compile_dense(model: nn.Module, kernels: KernelConfig, *, with_layers: bool = True) -> None:
    """Compiles what works on dense tokens [B, n, D], in place: feature tokens, interactions, gates, the head's MLP.

    The sequence parts stay eager: their kernels are opaque to the compiler.
    """
    compile_rows(model.get_submodule("tokens"), kernels)
    head = model.get_submodule("head")
    assert isinstance(head, Head)
    compile_head(head, kernels)
    for layer in getattr(model, "layers", ()) if with_layers else ():
        for name in ("summary", "gate", "interaction"):
            compile_part(layer.get_submodule(name), kernels)


def compile_layers(model: nn.Module, kernels: KernelConfig, *, with_forward: bool = True) -> None:
    """Compiles every layer as a whole: around the opaque kernels, norms, rotations and casts fuse with each other.

    One graph serves every total of events: rows are marked as a size that varies.

    Args:
        model: a `Gem`.
        kernels: of the run.
        with_forward: False only marks rows, for layers whose forward an activation policy has compiled.
    """
    for event in getattr(model, "events", ()):
        compile_events(event, kernels)
    for layer in getattr(model, "layers", ()):
        layer.register_forward_pre_hook(_mark_layer)
        if with_forward:
            compile_part(layer, kernels)


def compile_events(tokens: EventTokens, kernels: KernelConfig) -> None:
    """Compiles the merge of an event type's columns, and its rotations' tables where `compile_scope` says "all"."""
    compile_rows(tokens.merge, kernels)
    if kernels.compile_scope == "all" and tokens.rope is not None:
        tables = torch.compile(tokens.rotations, backend=_backend(kernels))

        def rotations(offsets_S: torch.Tensor, age_T: torch.Tensor) -> RopeTables:
            for tensor in (offsets_S, age_T):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return tables(offsets_S, age_T)

        setattr(tokens, "rotations", rotations)  # noqa: B010 - its type is a method


def compile_head(head: Head, kernels: KernelConfig) -> None:
    """Compiles the head's MLP, or all of it where `compile_scope` says "all"."""
    if kernels.compile_scope == "all":
        head.register_forward_pre_hook(_mark_head)
        compile_part(head, kernels)
    else:
        compile_rows(head.mlp, kernels)


def compile_part(module: nn.Module, kernels: KernelConfig) -> None:
    """Compiles a module's forward, in place; its hooks stay outside of the graph, unlike with `module.compile()`."""
    module.forward = torch.compile(module.forward, backend=_backend(kernels))


def _backend(kernels: KernelConfig) -> Backend:
    return _least_backend(INNER) if kernels.compile_saves == "least" else INNER


@functools.cache
def _least_backend(inner: Backend) -> Backend:
    """A compiler whose partitioner computes chains of elementwise work again, however long they are.

    Its rule of thumb against long chains cuts a layer after the cast of a bf16 stream to the float32 that a norm works
    in: it then writes and keeps the float32 copy although the bf16 rows are written too. The setting is no part of what
    a compiled graph is looked up by, and the backend is: so it has a backend of its own, always the same one. A graph
    is cut into forward and backward while its backend is called, also where backward is compiled later.
    """

    def compile_saving_least(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with functorch_config.patch(ban_recompute_long_fusible_chains=False):
            return torch._dynamo.lookup_backend(inner)(graph, inputs)

    return compile_saving_least


def compile_rows(module: nn.Module, kernels: KernelConfig) -> None:
    """`compile_part` for a module of tensors whose first size varies from batch to batch."""
    module.register_forward_pre_hook(_mark_rows)
    compile_part(module, kernels)


def _mark_rows(module: nn.Module, args: tuple[Any, ...]) -> None:
    for tensor in args:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _mark_layer(layer: nn.Module, args: tuple[Any, ...]) -> None:
    x_BnD, sequences, pooled = args
    for tensor in (x_BnD, *(p for p in pooled if p is not None)):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    for sequence in sequences:
        mark_sizes(sequence)


def _mark_head(head: nn.Module, args: tuple[Any, ...]) -> None:
    x_BnD, sequences = args
    torch._dynamo.maybe_mark_dynamic(x_BnD, 0)
    for sequence in sequences:
        mark_sizes(sequence)


def mark_sizes(sequence: Sequence) -> None:
    """Tells the compiler which sizes vary from batch to batch: rows, samples, and what schedules are cut into.

    What is not marked becomes a size that varies too, but only after a batch of another size has been compiled for.
    """
    plan = sequence.plan
    first = [sequence.s_TD, sequence.late_TD, sequence.offsets_S, sequence.lengths_B, plan.slot_T]
    first += [plan.cu_attention, plan.cu_sequences, plan.cu_seeds]
    first += [] if sequence.rope is None else [sequence.rope.cos_TJ, sequence.rope.sin_TJ]
    first += [plan.blocks_S3]
    second = [x for s in (plan.attention, plan.pffn, plan.pooling) if s is not None for x in s.tensors]
    for dim, tensors in ((0, first), (1, second)):
        for tensor in tensors:
            if tensor is not None and tensor.shape[dim] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)


def treat_activations(model: nn.Module, config: GemConfig) -> None:
    """From now on every layer treats what it saves for backward as `kernels.activations` says (gemworks.netmem)."""
    from gemworks.netmem import OffloadEngine, PinnedArena, apply_policy

    choice, device = config.kernels.activations, next(model.parameters()).device
    engine = None
    if choice in ("quantise", "offload", "quantise_offload"):
        num_bytes = ARENA_BYTES if device.type == "cuda" else CPU_ARENA_BYTES
        engine = OffloadEngine(PinnedArena(num_bytes, pin=device.type == "cuda"), device=device)
    compiled = config.train.compile and config.kernels.compiles_layers
    apply_policy(
        model,
        {f"layers.{i}": choice for i in range(config.model.num_layers)},
        engine=engine,
        codec="mxfp8" if choice in ("quantise", "quantise_offload") else None,
        compile_kwargs={"fullgraph": False, "backend": _backend(config.kernels)} if compiled else None,
    )
