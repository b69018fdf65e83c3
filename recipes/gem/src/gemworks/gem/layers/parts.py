"""The layer types of a model as things to time: a call, what it differentiates, its FLOPs, and its matrix products.

Letters: B samples, T packed events, n tokens, D model width, E width of an event type, M merged width, K PFFN rows,
P seeds, W embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from gemworks.gem.config import EventSizes, GemConfig
from gemworks.gem.efficiency import BWD_FACTOR, FlopCount, count_flops
from gemworks.gem.flop_costs import PairRule, merged_width
from gemworks.gem.implement import (
    compile_events,
    compile_head,
    compile_part,
    compile_rows,
    mark_sizes,
    quantise_linears,
)
from gemworks.gem.model.attention import SelfAttention
from gemworks.gem.model.events import EventTokens, Sequence
from gemworks.gem.model.head import Head
from gemworks.gem.model.layer import EventBlock, GemLayer
from gemworks.gem.model.norms import layer_norm, rms_norm, sum_rms_norm
from gemworks.gem.model.pffn import Pffn
from gemworks.gem.model.pooling import SeedPooling
from gemworks.gem.model.tokens import FeatureTokens
from gemworks.gem.plan import fmb_tokens, interaction_tokens, layer_parts
from gemworks.gem.schema import Events, EventType, Schema
from torch import Tensor, nn

WIDTH = 2  # bytes of a bf16 value
TRAINING = 1.0 + BWD_FACTOR  # FLOPs of forward and backward per FLOP of forward
EMBEDDINGS = "not timed alone: table lookups need torchrec; their time is in the ladder's step"


@dataclass(frozen=True)
class Product:
    """One matrix product of a layer's forward, or one attention: what its least time follows from.

    Attributes:
        rows, inner, columns: of a linear product [rows, inner] x [inner, columns]; 0 for an attention.
        flops: forward.
        forward_bytes, backward_bytes: read and written once each, in bf16.
    """

    flops: float
    forward_bytes: float
    backward_bytes: float
    rows: int = 0
    inner: int = 0
    columns: int = 0
    is_attention: bool = False


def linear_product(rows: int, inner: int, columns: int, *, times: int = 1) -> Product:
    """`times` products one after another, as of the samples of a batch."""
    size = WIDTH * times * (rows * inner + inner * columns + rows * columns)
    return Product(2.0 * times * rows * inner * columns, size, 2 * size, rows if times == 1 else 0, inner, columns)


def attention_product(flops: float, q: float, k: float, v: float, out: float) -> Product:
    """An attention of so many values of q, k, v and out; backward reads them and d_out, and writes three gradients."""
    return Product(flops, WIDTH * (q + k + v + out), WIDTH * (2 * (q + k + v) + 2 * out), is_attention=True)


@dataclass(frozen=True)
class Part:
    """A layer type, ready to run.

    Attributes:
        name: such as "pffn", with the event type in front where there are several.
        count: how often the model has it; 0 for what is inside another part and is timed to look closer.
        flops: forward and backward of one call.
        is_sequence: grows with the number of events.
        forward: returns the output, or several; gradients go to `leaves`.
        leaves: inputs and parameters that get a gradient.
        products: of the forward.
        refusal: why it cannot run here; then there is no `forward`.
    """

    name: str
    count: int
    flops: float
    is_sequence: bool
    forward: Callable[[], Tensor | tuple[Tensor, ...]] | None
    leaves: tuple[Tensor, ...] = ()
    products: tuple[Product, ...] = ()
    refusal: str = ""


def _leaf(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def make_parts(
    config: GemConfig, schema: Schema, lengths: Mapping[str, Tensor], device: torch.device
) -> Iterator[Part]:
    """The parts of `Gem(schema, config)` on random inputs, one after another so that memory is freed in between.

    Args:
        config: sizes, kernels, and whether parts are compiled.
        schema: of the model.
        lengths: int64 [B] on the CPU per event type.
        device: where to run.
    """
    model, flops = config.model, count_flops(config, schema, lengths)
    batch = next(iter(lengths.values())).shape[0]
    sizes = [model.event(event.name) for event in schema.events]
    yield Part("embeddings", 1, 0.0, False, None, refusal=EMBEDDINGS)
    tokens = FeatureTokens(len(schema.ids), len(schema.dense_names), model, device=device)
    ids = _leaf(batch, len(schema.ids), model.embedding_dim, device=device, dtype=torch.float32)
    dense = torch.randn(batch, len(schema.dense_names), device=device)
    yield _part("tokens", 1, TRAINING * flops.parts["tokens"], tokens, (ids, dense), config)
    for event, size in zip(schema.events, sizes, strict=True):
        prefix = f"{event.name}." if len(sizes) > 1 else ""
        yield from _event_parts(config, event, prefix, size, lengths[event.name], flops, device)
    yield from _summary_parts(config, sizes, batch, flops, device)
    yield _experts_part(config, sizes, batch, flops, device)
    yield _head_part(config, schema, lengths, flops, device)


def _dtypes(config: GemConfig) -> tuple[torch.dtype, torch.dtype]:
    """Of products, and of the tokens between the layers."""
    dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32
    return dtype, torch.float32 if config.kernels.stream == "float32" else dtype


def _event_parts(
    config: GemConfig,
    event: EventType,
    prefix: str,
    size: EventSizes,
    lengths_B: Tensor,
    flops: FlopCount,
    device: torch.device,
) -> Iterator[Part]:
    """The merge of one event type, and its sequence parts."""
    model = config.model
    merge = EventTokens(event, size, model, config.kernels, device=device)
    if config.train.compile and config.kernels.compiles_layers:
        compile_events(merge, config.kernels)
    events, timestamps = _events(len(event.float_names), lengths_B, config, device)
    total = events.timestamps_T.shape[0]
    rows = [_leaf(total, model.embedding_dim, device=device, dtype=torch.float32) for _ in event.ids]
    merged = merged_width(event, model.embedding_dim)
    products = (
        linear_product(total, merged, model.mask_dim),
        linear_product(total, model.mask_dim, merged),
        linear_product(total, merged, size.dim),
    )
    yield Part(
        f"{prefix}events", 1, TRAINING * flops.parts[f"{event.name}.merge"], True,
        lambda m=merge, r=rows: m(r, events, timestamps).s_TD, (*rows, *merge.parameters()), products,
    )  # fmt: skip
    with torch.no_grad():
        sequence = merge(rows, events, timestamps)
    del rows, merge
    yield from _sequence_parts(config, event.name, prefix, size, sequence, lengths_B, flops, device)


def _summary_parts(
    config: GemConfig, sizes: list[EventSizes], batch: int, flops: FlopCount, device: torch.device
) -> Iterator[Part]:
    """Token map and gate of the first layer, where it has other inputs than the rest, and of the rest."""
    model, num_tokens = config.model, interaction_tokens(config, sizes)
    same = num_tokens == model.num_tokens
    for name, index, inputs, count in (
        ("first summary", 0, model.num_tokens, 0 if same else 1),
        ("summary", model.num_layers - 1, num_tokens, model.num_layers - (0 if same else 1)),
    ):
        if count:
            layer = GemLayer(config, sizes, index, inputs, device=device)
            x = _leaf(batch, inputs, model.dim, device=device, dtype=torch.float32)
            cost = TRAINING * flops.parts[f"layer{index}.summary"]
            yield _part(name, count, cost, nn.Sequential(layer.summary, layer.gate), (x,), config)


def _experts_part(
    config: GemConfig, sizes: list[EventSizes], batch: int, flops: FlopCount, device: torch.device
) -> Part:
    model, num_tokens = config.model, interaction_tokens(config, sizes)
    layer = GemLayer(config, sizes, 0, model.num_tokens, device=device)
    both = _leaf(batch, num_tokens, model.dim, device=device, dtype=_dtypes(config)[0])
    width = model.wukong_rank * num_tokens
    num_fmb = fmb_tokens(num_tokens, config)
    products = (
        linear_product(batch, width, model.expert_dim),
        linear_product(batch, model.expert_dim, num_fmb * model.dim),
        linear_product(model.wukong_rank, num_tokens, model.dim, times=batch),
        linear_product(num_tokens, model.wukong_rank, model.dim, times=batch),
        linear_product(num_tokens - num_fmb, num_tokens, model.dim, times=batch),
    ) * (model.num_experts * model.expert_layers)
    cost = TRAINING * flops.parts["layer0.experts"]
    part = _part("experts", model.num_layers, cost, layer.interaction, (both,), config)
    return replace(part, products=products)


def _head_part(
    config: GemConfig, schema: Schema, lengths: Mapping[str, Tensor], flops: FlopCount, device: torch.device
) -> Part:
    model, sizes = config.model, [config.model.event(event.name) for event in schema.events]
    num_tokens = interaction_tokens(config, sizes)
    head = Head(num_tokens, sizes, len(schema.tasks), model, config.kernels, device=device)
    batch = next(iter(lengths.values())).shape[0]
    x = _leaf(batch, num_tokens, model.dim, device=device, dtype=torch.float32)
    ends = [
        bare_sequence(lengths[event.name], size, config, device, _dtypes(config)[1])
        for event, size in zip(schema.events, sizes, strict=True)
    ]
    if config.train.compile:
        compile_head(head, config.kernels)
    leaves = (x, *(s.s_TD for s in ends), *head.parameters())
    return Part("head", 1, TRAINING * flops.parts["head"], False, lambda: head(x, ends), leaves)


def _part(
    name: str, count: int, flops: float, module: nn.Module, inputs: tuple[Tensor, ...], config: GemConfig
) -> Part:  # fmt: skip
    """A dense part, which has one tensor of input or two."""
    if config.train.compile:
        compile_rows(module, config.kernels)
    leaves = (*(x for x in inputs if x.requires_grad), *module.parameters())
    return Part(name, count, flops, False, lambda: module(*inputs), leaves)


def _events(num_floats: int, lengths_B: Tensor, config: GemConfig, device: torch.device) -> tuple[Events, Tensor]:
    offsets_S = torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0)])
    total = int(offsets_S[-1])
    now = 1_700_000_000
    ages_T = torch.randint(1, 30 * 86400, (total,))
    floats_TC = torch.randn(total, num_floats, device=device)
    events = Events(floats_TC, (now - ages_T).to(device), offsets_S.to(device), config.data.max_length)
    return events, torch.full((lengths_B.shape[0],), now, device=device)


def bare_sequence(
    lengths_B: Tensor, size: EventSizes, config: GemConfig, device: torch.device, dtype: torch.dtype
) -> Sequence:
    """Random tokens of given lengths as they run between the layers, with their plan and rotations."""
    event = EventType(name="", ids=())
    tokens = EventTokens(event, size, config.model, config.kernels, device=device)
    events, timestamps = _events(0, lengths_B, config, device)
    with torch.no_grad():
        sequence = tokens([], events, timestamps)
    return sequence.replace_tokens(torch.randn_like(sequence.s_TD, dtype=dtype).requires_grad_())


def _sequence_parts(
    config: GemConfig,
    event: str,
    prefix: str,
    size: EventSizes,
    sequence: Sequence,
    lengths_B: Tensor,
    flops: FlopCount,
    device: torch.device,
) -> Iterator[Part]:
    model, stream = config.model, _dtypes(config)[1]
    batch, total, width = lengths_B.shape[0], int(lengths_B.sum()), size.dim
    sequence = sequence.replace_tokens(torch.randn_like(sequence.s_TD, dtype=stream).requires_grad_())
    x_sum = _leaf(batch, model.num_summary_tokens, model.dim, device=device, dtype=torch.float32)
    kinds = [layer_parts(config, size, i) for i in range(model.num_layers)]
    seed_values, rows = batch * size.num_seeds * width, batch * model.pffn_rows * width
    pairs = sum(
        PairRule(kind=size.attention, block=model.block, window=size.window).pairs(n) for n in lengths_B.tolist()
    )
    tokens = total * width

    def block(kind: str) -> tuple[nn.Module, int]:
        chosen = [i for i, parts in enumerate(kinds) if getattr(parts, kind)]
        layer = GemLayer(config, [model.event(e) for e in [event]], chosen[0], model.num_tokens, device=device)
        name = {"pools": "pool"}.get(kind, kind)
        return layer.get_submodule(f"blocks.0.{name}"), len(chosen)

    k, n, tok, rank = model.pffn_rows, model.num_summary_tokens, size.num_sequence_tokens, model.kronecker_rank
    costs = {
        "hsp": (
            linear_product(total, width, 2 * width),
            attention_product(4.0 * size.num_seeds * tokens, size.num_seeds * width, tokens, tokens, seed_values),
            linear_product(tok * rank, size.num_seeds, width, times=batch),
            linear_product(batch * tok, rank * width, model.dim),
        ),
        "pffn": (
            *(linear_product(batch * n, model.dim, width), linear_product(k, n, width, times=batch)) * 2,
            attention_product(4.0 * k * tokens, tokens, rows, rows, tokens),
        ),
        "attention": (
            linear_product(total, width, 3 * width),
            attention_product(4.0 * width * pairs, tokens, tokens, tokens, tokens),
            linear_product(total, width, width),
        ),
    }
    whole = config.train.compile and config.kernels.compiles_layers
    for name, attribute in (("hsp", "pool"), ("pffn", "pffn"), ("attention", "attention")):
        chosen = [i for i, parts in enumerate(kinds) if getattr(parts, "pools" if name == "hsp" else name)]
        if not chosen:
            continue
        layer = GemLayer(config, [size], chosen[0], model.num_tokens, device=device)
        module = layer.get_submodule(f"blocks.0.{attribute}")
        del layer
        if config.kernels.linears != "bf16":
            quantise_linears(module, config.kernels)
        inputs = (sequence, x_sum) if name == "pffn" else (sequence,)
        if whole:
            compile_part(module, config.kernels)
            mark_sizes(sequence)
            torch._dynamo.maybe_mark_dynamic(x_sum, 0)
        leaves = (sequence.s_TD, *inputs[1:], *module.parameters())
        core, core_leaves = _core(module, sequence, x_sum, config)
        prefix_of = f"layer{chosen[0]}.{event}.{name}."
        cost = TRAINING * sum(f for key, f in flops.parts.items() if key.startswith(prefix_of))
        yield Part(f"{prefix}{name}", len(chosen), cost, True, partial(module, *inputs), leaves, costs[name])
        core_cost = TRAINING * flops.parts[f"{prefix_of}core"]
        (product,) = (p for p in costs[name] if p.is_attention)
        yield Part(f"{prefix}{name}/core", 0, core_cost, True, core, core_leaves, (product,))
    if kinds[0].pools and kinds[0].pffn and kinds[0].attention:
        yield _whole_layer(config, event, prefix, size, sequence, x_sum, flops, costs)
    norm = config.kernels.norm
    other = torch.randn_like(sequence.s_TD)
    yield Part(f"{prefix}norm/rms", 0, 0.0, True, lambda: rms_norm(sequence.s_TD, norm), (sequence.s_TD,))
    add = (sequence.s_TD, other.requires_grad_())
    yield Part(f"{prefix}norm/sum_rms_add", 0, 0.0, True, lambda: sum_rms_norm(*add, norm, add=add[0]), add)
    yield Part(f"{prefix}norm/layer", 0, 0.0, True, lambda: layer_norm(sequence.s_TD, norm), (sequence.s_TD,))


class _WholeBlock(nn.Module):
    """Pooling, PFFN and self-attention of a layer in one call: tokens after them, the summary, and a late residual."""

    def __init__(self, block: EventBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, sequence: Sequence, x_sum_BnD: Tensor) -> tuple[Tensor, ...]:
        sequence = sequence.summed()
        summary_BnD = self.block.summarise(sequence, None)
        after = self.block(sequence, x_sum_BnD)
        return (after.s_TD, summary_BnD) if after.late_TD is None else (after.s_TD, summary_BnD, after.late_TD)


def _whole_layer(
    config: GemConfig,
    event: str,
    prefix: str,
    size: EventSizes,
    sequence: Sequence,
    x_sum: Tensor,
    flops: FlopCount,
    costs: Mapping[str, tuple[Product, ...]],
) -> Part:
    """A first layer's sequence parts as one module, compiled as one graph as in a step: norms fuse across its parts.
    With a late residual it is one of the layers after it: it adds what the layer before left, and leaves its own."""
    if config.kernels.late_residual:
        sequence = sequence.replace_tokens(sequence.s_TD, torch.randn_like(sequence.s_TD).requires_grad_())
    module = _WholeBlock(EventBlock(config, size, 0, device=x_sum.device))
    if config.kernels.linears != "bf16":
        quantise_linears(module, config.kernels)
    if config.train.compile and config.kernels.compiles_layers:
        compile_part(module, config.kernels)
        mark_sizes(sequence)
        torch._dynamo.maybe_mark_dynamic(x_sum, 0)
    parts = tuple(f"layer0.{event}.{name}." for name in costs)
    cost = TRAINING * sum(f for key, f in flops.parts.items() if key.startswith(parts))
    late = () if sequence.late_TD is None else (sequence.late_TD,)
    leaves = (sequence.s_TD, *late, x_sum, *module.parameters())
    products = tuple(product for of_part in costs.values() for product in of_part)
    return Part(f"{prefix}layer", 0, cost, True, partial(module, sequence, x_sum), leaves, products)


def _core(
    module: nn.Module, sequence: Sequence, x_sum: Tensor, config: GemConfig
) -> tuple[Callable[[], Tensor], tuple[Tensor, ...]]:
    """The attention inside a module, with whatever rotations and norms its kernel settings put around it."""
    total, device, dtype = sequence.s_TD.shape[0], sequence.s_TD.device, _dtypes(config)[0]

    def rows(*shape: int) -> Tensor:
        return _leaf(*shape, device=device, dtype=dtype)

    if isinstance(module, SelfAttention):
        qkv = rows(total, 3 * module.num_heads, module.head_dim)
        return lambda: module.attend(qkv, sequence), (qkv,)
    if isinstance(module, SeedPooling):
        seeds, kv = rows(*module.seeds_PNH.shape), rows(total, 2 * module.num_heads, module.head_dim)
        return lambda: module.attend(seeds, kv, sequence), (seeds, kv)
    assert isinstance(module, Pffn)
    q = rows(total, module.num_heads, module.head_dim)
    k, v = (rows(x_sum.shape[0], module.num_rows, module.num_heads, module.head_dim) for _ in range(2))
    return lambda: module.attend(q, k, v, sequence), (q, k, v)
