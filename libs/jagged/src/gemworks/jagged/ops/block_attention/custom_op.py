"""BlockAttention as opaque custom ops: on q, k, v and on one packed projection, each with its backward.

On a CPU the kernels are the formulas in PyTorch; on CUDA the dispatch rules choose between Triton and these formulas.

Letters: T packed rows, N query heads, M key heads, H head width, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from gemworks.jagged._attention_args import split_heads
from gemworks.jagged._checks import is_host
from gemworks.jagged._custom_op import custom_op
from gemworks.jagged._imports import when_imported
from gemworks.jagged.dispatch import architecture_of, backend_of
from gemworks.jagged.ops.block_attention.formulas import BlockArgs, block_backward, block_forward
from torch import Tensor

# The fields of BlockArgs, last in the schema of every operator here.
SETTINGS = "Tensor table, Tensor? cos, Tensor? sin, float scale, SymInt block, bool causal, bool qk_norm, float eps"


def has_kernel_for(x: Tensor, head_dim: int) -> bool:
    """Whether a kernel runs, of either language: which one, launch.py says."""
    if x.device.type != "cuda":
        return False
    return backend_of("block_attention", x.dtype, architecture_of(x.device), head_dim) != "reference"


def forward(q: Tensor, k: Tensor, v: Tensor, args: BlockArgs) -> Tensor:
    if has_kernel_for(q, q.shape[-1]):
        from gemworks.jagged.ops.block_attention.launch import block_attention_forward

        return block_attention_forward(q, k, v, args)
    return block_forward(q, k, v, args)


def _block_attention(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Tensor:
    """[T, N, V], contiguous."""
    return forward(q, k, v, BlockArgs(*settings))


block_attention_op = custom_op(
    "block_attention", _block_attention, f"(Tensor q, Tensor k, Tensor v, {SETTINGS}) -> Tensor"
)


@block_attention_op.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _block_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous."""
    args = BlockArgs(*settings)
    if not has_kernel_for(q, q.shape[-1]):
        return block_backward(dout, q, k, v, args)
    from gemworks.jagged.ops.block_attention.launch import block_attention_backward

    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    block_attention_backward(dout, q, k, v, dq, dk, dv, args)
    return dq, dk, dv


block_attention_backward_op = custom_op(
    "block_attention_backward",
    _block_attention_backward,
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
)


@block_attention_backward_op.register_fake
def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _block_attention_qkv(qkv: Tensor, num_heads: int, *settings: Any) -> Tensor:
    """[T, N, H], contiguous, from [T, N + 2 M, H]."""
    return forward(*split_heads(qkv, num_heads), BlockArgs(*settings))


block_attention_qkv_op = custom_op(
    "block_attention_qkv", _block_attention_qkv, f"(Tensor qkv, SymInt num_heads, {SETTINGS}) -> Tensor"
)


@block_attention_qkv_op.register_fake
def _qkv_fake(qkv: Tensor, num_heads: int, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape[0], num_heads, qkv.shape[2])


def backward_qkv(dout: Tensor, qkv: Tensor, num_heads: int, *settings: Any) -> Tensor:
    """The gradient of the packed projection in one tensor: three would cost as many bytes again to join."""
    args = BlockArgs(*settings)
    q, k, v = split_heads(qkv, num_heads)
    if not has_kernel_for(qkv, qkv.shape[-1]):
        return torch.cat(block_backward(dout, q, k, v, args), dim=1)
    from gemworks.jagged.ops.block_attention.launch import block_attention_backward

    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    block_attention_backward(dout, q, k, v, *split_heads(dqkv, num_heads), args)
    return dqkv


block_attention_qkv_backward_op = custom_op(
    "block_attention_qkv_backward",
    backward_qkv,
    f"(Tensor dout, Tensor qkv, SymInt num_heads, {SETTINGS}) -> Tensor",
)


@block_attention_qkv_backward_op.register_fake
def _qkv_backward_fake(dout: Tensor, qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, table, cos, sin, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, table, cos, sin)


def _backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    q, k, v, table, cos, sin = ctx.saved_tensors
    return *block_attention_backward_op(dout, q, k, v, table, cos, sin, *ctx.settings), *(None,) * 8


def _save_qkv(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, ctx.num_heads, table, cos, sin, *ctx.settings = inputs
    ctx.save_for_backward(qkv, table, cos, sin)


def _backward_qkv(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    qkv, table, cos, sin = ctx.saved_tensors
    dqkv = block_attention_qkv_backward_op(dout, qkv, ctx.num_heads, table, cos, sin, *ctx.settings)
    return dqkv, *(None,) * 9


block_attention_op.register_autograd(_backward, setup_context=_save)
block_attention_qkv_op.register_autograd(_backward_qkv, setup_context=_save_qkv)


def pairs_of(table: Any, total: int, block: int, causal: bool) -> int:
    """Admitted pairs: exact where the table can be read for free, else as if every row were in a full block."""
    if isinstance(table, Tensor) and is_host(table):
        length = table[:, 1].to(torch.int64)
        return int((length * (length + 1) // 2 if causal else length * length).sum())
    return total * (block + 1) // 2 if causal else total * block


def _flops(q: Any, value_dim: int, num_heads: int, table: Any, block: int, causal: bool) -> int:
    return 2 * pairs_of(table, q.shape[0], block, causal) * num_heads * (q.shape[2] + value_dim)


def _forward_flops(
    q: Any, k: Any, v: Any, table: Any, cos: Any, sin: Any, scale: float, block: int, causal: bool, *_: Any, **__: Any
) -> int:
    return _flops(q, v.shape[2], q.shape[1], table, block, causal)


def _backward_flops(dout: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """Five products against two, as torch counts the backward of its attention ops."""
    return _forward_flops(q, k, v, *args, **kwargs) * 5 // 2


def _forward_qkv_flops(
    qkv: Any, num_heads: int, table: Any, cos: Any, sin: Any, scale: float, block: int, causal: bool, *_: Any, **__: Any
) -> int:
    return _flops(qkv, qkv.shape[2], num_heads, table, block, causal)


def _backward_qkv_flops(dout: Any, qkv: Any, *args: Any, **kwargs: Any) -> int:
    return _forward_qkv_flops(qkv, *args, **kwargs) * 5 // 2


def _register_flops(flop_counter: Any) -> None:
    ops = torch.ops.gemworks_jagged
    for op, formula in (
        (ops.block_attention, _forward_flops),
        (ops.block_attention_backward, _backward_flops),
        (ops.block_attention_qkv, _forward_qkv_flops),
        (ops.block_attention_qkv_backward, _backward_qkv_flops),
    ):
        flop_counter.register_flop_formula(op, get_raw=True)(formula)


when_imported("torch.utils.flop_counter", _register_flops)
