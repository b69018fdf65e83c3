"""BlockAttention beside torch's varlen_attn over the same blocks, with rope on both sides or on ours alone.

Letters: T packed rows, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gemworks.jagged import (
    BlockSchedule,
    Rope,
    RopeTables,
    attention_flops,
    block_attention,
    block_attention_qkv,
    num_pairs,
    offsets_from_lengths,
)
from gemworks.jagged.bench.bandwidth import Forward, Subject, assert_near
from torch import Tensor
from torch.nn import functional

SEED = 0
VARIANTS = ("plain", "rope", "norm rope", "norm rope qkv", "rope fp16 tables")


@dataclass(frozen=True)
class Shape:
    num_sequences: int = 1152
    max_length: int = 2000
    num_heads: int = 4
    head_dim: int = 128
    block: int = 64


LATE = ("block32", "block128")  # ends of labels that are measured last, where time may run out
LONGEST = Shape(num_sequences=16, max_length=16384)


def block_lengths(num_sequences: int, max_length: int) -> Tensor:
    """Uniform on [0.4, 1] of the longest: mean 0.7."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(int(0.4 * max_length), max_length + 1, (num_sequences,), generator=generator)


@dataclass(frozen=True)
class _Batch:
    """What all variants of a shape share."""

    shape: Shape
    lengths: Tensor
    offsets: Tensor
    schedule: BlockSchedule
    cuts: Tensor  # cu_seqlens of the blocks
    tables: RopeTables
    qkv: Tensor
    parts: list[Tensor]
    d_out: Tensor

    @classmethod
    def make(cls, shape: Shape, device: torch.device, dtype: torch.dtype) -> _Batch:
        lengths = block_lengths(shape.num_sequences, shape.max_length)
        offsets, total = offsets_from_lengths(lengths).to(device), int(lengths.sum())
        schedule = BlockSchedule.make(offsets, total=total, block=shape.block)
        table = schedule.table_S3[schedule.table_S3[:, 1] > 0]
        ages = torch.rand(total, device=device) * 1e6
        generator = torch.Generator(device).manual_seed(SEED)
        heads, width = shape.num_heads, shape.head_dim
        qkv = torch.randn(total, 3 * heads, width, generator=generator, device=device, dtype=dtype)
        return cls(
            shape,
            lengths,
            offsets,
            schedule,
            torch.cat([table[:, 0], table.new_full((1,), total)]).to(torch.int32),
            Rope(time_fraction=0.5).tables(offsets, width, total=total, dt=ages),
            qkv.detach().clone().requires_grad_(),
            [x.contiguous().requires_grad_() for x in qkv.split(heads, dim=1)],
            torch.randn(total, heads, width, generator=generator, device=device, dtype=dtype),
        )


def subjects(
    device: torch.device, dtype: torch.dtype, shape: Shape | None = None, variants: tuple[str, ...] = VARIANTS
) -> Iterator[tuple[str, Callable[[], Subject]]]:
    """(label, how to make it) of every variant; the batch exists once the first of them is made."""
    shape = shape or Shape()
    kept: list[_Batch] = []

    def make(variant: str) -> Subject:
        if not kept:
            kept.append(_Batch.make(shape, device, dtype))
        batch = kept[0]
        if variant == variants[-1]:  # its gigabytes end with the last subject that needs them
            kept.clear()
        return _subject(batch, variant)

    where = "" if shape == Shape() else f" B{shape.num_sequences} max{shape.max_length} block{shape.block}"
    for variant in variants:
        yield f"block_attention {variant}{where}", lambda v=variant: make(v)


def _front(rope: RopeTables | None, norm: bool) -> Forward:
    """What the peer does before attention: QK-norm and rope in plain PyTorch."""

    def front(x: Tensor) -> Tensor:
        if norm:
            x = functional.rms_norm(x, x.shape[-1:], None, 1e-6)
        if rope is None:
            return x
        a, b = x.float().chunk(2, dim=-1)
        cos, sin = rope.cos_TJ[:, None], rope.sin_TJ[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    return front


def _subject(batch: _Batch, variant: str) -> Subject:
    shape, dtype = batch.shape, batch.qkv.dtype
    rope: RopeTables | None = None
    if "rope" in variant:
        rope = batch.tables
        if "fp16" in variant:
            rope = RopeTables(rope.cos_TJ.half(), rope.sin_TJ.half())
    norm, packed = "norm" in variant, "qkv" in variant
    settings: dict[str, Any] = {"block": shape.block, "rope": rope, "qk_norm": norm, "schedule": batch.schedule}

    def ours(*leaves: Tensor) -> Tensor:
        if packed:
            return block_attention_qkv(
                leaves[0], batch.offsets, num_heads=shape.num_heads, max_length=shape.max_length, **settings
            )
        q, k, v = leaves
        return block_attention(q, k, v, batch.offsets, max_length_q=shape.max_length, **settings)

    def varlen(with_front: bool) -> tuple[Forward, list[Tensor]]:
        from torch.nn.attention.varlen import varlen_attn

        front: Any = _front(rope, norm)
        if with_front and (norm or rope is not None):
            torch._dynamo.reset()
            front = torch.compile(front, dynamic=False)
        elif not with_front:
            front = _front(None, False)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return varlen_attn(front(q), front(k), v, batch.cuts, batch.cuts, shape.block, shape.block)

        return attend, batch.parts

    peers: dict[str, Any] = {"torch varlen_attn": lambda: varlen(True)}
    if variant != "plain":  # the harder bar: the peer need not norm or turn anything
        peers["torch varlen_attn without rope"] = lambda: varlen(False)
    total = batch.d_out.shape[0]
    tensor_bytes = batch.d_out.numel() * dtype.itemsize
    table_bytes = 0 if rope is None else 2 * rope.cos_TJ.numel() * rope.cos_TJ.element_size()
    pairs = int(num_pairs(batch.lengths, block=shape.block))
    leaves = [batch.qkv] if packed else batch.parts
    return Subject(
        common={
            "op": f"block_attention {variant}",
            "shape": f"B{shape.num_sequences} max{shape.max_length} block{shape.block}",
            "head_dim": str(shape.head_dim),
            "dtype": str(dtype).removeprefix("torch."),
            "law": "mean70",
            "mean_len": f"{total / shape.num_sequences:.1f}",
            "max_len": str(int(batch.lengths.max())),
            "seed": str(SEED),
        },
        ours=ours,
        leaves=leaves,
        peers=peers,
        cotangents=[batch.d_out],
        bytes_fwd=4 * tensor_bytes + table_bytes,
        bytes_bwd=7 * tensor_bytes + table_bytes,
        check=lambda outs: _check(batch, outs[0], leaves, settings),
        flops=attention_flops(pairs, shape.num_heads, shape.head_dim),
        same_function=frozenset({"torch varlen_attn"}),
    )


def _check(batch: _Batch, out: Tensor, leaves: list[Tensor], settings: dict[str, Any]) -> None:
    """A few sequences against float64, and finite everywhere."""
    grads = torch.autograd.grad(out, leaves, batch.d_out, retain_graph=True)
    assert all(bool(x.isfinite().all()) for x in (out, *grads))
    qkv, grad = (torch.cat(list(xs), dim=1) if len(xs) == 3 else xs[0] for xs in (leaves, grads))
    edges = batch.offsets.tolist()
    rope, kept = settings["rope"], {name: settings[name] for name in ("block", "qk_norm")}
    for b in (0, len(edges) // 2, len(edges) - 2):
        part = slice(edges[b], edges[b + 1])
        exact = qkv[part].detach().double().requires_grad_()
        tables = None if rope is None else RopeTables(rope.cos_TJ[part].double(), rope.sin_TJ[part].double())
        alone = torch.tensor([0, exact.shape[0]], device=out.device)
        truth = block_attention_qkv(
            exact, alone, num_heads=batch.shape.num_heads, max_length=exact.shape[0], rope=tables, **kept
        )
        assert_near(out[part], truth, "block_attention forward")
        (expected,) = torch.autograd.grad(truth, exact, batch.d_out[part].double())
        assert_near(grad[part], expected, "block_attention backward")
