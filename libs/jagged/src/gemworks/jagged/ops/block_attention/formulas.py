"""Attention inside blocks, forward and backward, in PyTorch: what the custom op runs on a CPU.

The backward is written out, as the kernel's is, because a custom op's kernels run below autograd.

Letters: S blocks, L rows of a block as queries, K the same rows as keys, N query heads, M key heads, G = N / M,
H head width, J = H / 2, V value width, T packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.jagged._dense import compute_dtype, without_autocast
from torch import Tensor


@dataclass(frozen=True)
class BlockArgs:
    """What both directions share."""

    table_S3: Tensor
    cos_TJ: Tensor | None
    sin_TJ: Tensor | None
    scale: float
    block: int
    causal: bool
    qk_norm: bool
    eps: float


@dataclass(frozen=True)
class _Blocks:
    """The rows of each block: indices [S, L] and which of them exist."""

    row_SL: Tensor
    inside_SL: Tensor

    @staticmethod
    def of(table_S3: Tensor, block: int, total: int) -> _Blocks:
        at_L = torch.arange(block, device=table_S3.device)
        row_SL = (table_S3[:, :1].to(torch.int64) + at_L).clamp(max=max(total - 1, 0))
        return _Blocks(row_SL, at_L < table_S3[:, 1:2])

    def gather(self, x_TNH: Tensor) -> Tensor:
        """[T, N, H] to [S, N, L, H] in the dtype of computation; rows that are not there are 0, whatever they hold."""
        if x_TNH.shape[0] == 0:
            return x_TNH.new_zeros(0)
        tile = x_TNH[self.row_SL].to(compute_dtype(x_TNH.dtype))
        return tile.masked_fill(~self.inside_SL[:, :, None, None], 0.0).transpose(1, 2)

    def scatter(self, tile_SNLH: Tensor, like: Tensor) -> Tensor:
        out = torch.zeros((like.shape[0], *tile_SNLH.shape[1::2]), dtype=like.dtype, device=like.device)
        out[self.row_SL[self.inside_SL]] = tile_SNLH.transpose(1, 2)[self.inside_SL].to(like.dtype)
        return out


@dataclass(frozen=True)
class _Tiles:
    """q and k after norm and turn, v, the weights, and what the adjoints need."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    q_scale: Tensor | None
    k_scale: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


def _turn(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None or sin is None:
        return x
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _prepare(x: Tensor, args: BlockArgs, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor | None]:
    scale = None
    if args.qk_norm:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + args.eps)
        x = x * scale
    return _turn(x, cos, sin), scale


def _tiles(q: Tensor, k: Tensor, v: Tensor, blocks: _Blocks, args: BlockArgs) -> _Tiles:
    cos = sin = None
    if args.cos_TJ is not None and args.sin_TJ is not None:
        dtype = compute_dtype(q.dtype)
        cos, sin = (blocks.gather(t[:, None]).to(dtype) for t in (args.cos_TJ, args.sin_TJ))
    group = q.shape[1] // k.shape[1]
    q_SNLH, q_scale = _prepare(blocks.gather(q), args, cos, sin)
    k_SMKH, k_scale = _prepare(blocks.gather(k), args, cos, sin)
    k_SNKH = k_SMKH.repeat_interleave(group, dim=1)
    v_SNKV = blocks.gather(v).repeat_interleave(group, dim=1)
    admitted = blocks.inside_SL[:, None, None, :]
    if args.causal:
        admitted = admitted & torch.ones(args.block, args.block, dtype=torch.bool, device=q.device).tril()
    logits = (args.scale * q_SNLH @ k_SNKH.mT).masked_fill(~admitted, float("-inf"))
    p = logits.softmax(-1).masked_fill(~blocks.inside_SL[:, None, :, None], 0.0)
    return _Tiles(q_SNLH, k_SNKH, v_SNKV, p, q_scale, k_scale, cos, sin)


@without_autocast
def block_forward(q: Tensor, k: Tensor, v: Tensor, args: BlockArgs) -> Tensor:
    """[T, N, V], contiguous; rows outside every block are 0."""
    if q.shape[0] == 0:
        return q.new_zeros(0, q.shape[1], v.shape[-1])
    blocks = _Blocks.of(args.table_S3, args.block, q.shape[0])
    tiles = _tiles(q, k, v, blocks, args)
    return blocks.scatter(tiles.p @ tiles.v, q)


@without_autocast
def block_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, args: BlockArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous: `dV = P^T dO`, `dS = P (dP - rowsum(P dP))` with `dP = dO V^T`."""
    if q.shape[0] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    blocks = _Blocks.of(args.table_S3, args.block, q.shape[0])
    t = _tiles(q, k, v, blocks, args)
    group = q.shape[1] // k.shape[1]
    dout_SNLV = blocks.gather(dout)
    dv = t.p.mT @ dout_SNLV
    dp = dout_SNLV @ t.v.mT
    ds = t.p * (dp - (t.p * dp).sum(-1, keepdim=True)) * args.scale
    dq = _adjoint(ds @ t.k, t.q, t.q_scale, t)
    dk = _sum_groups(ds.mT @ t.q, group)
    dk = _adjoint(dk, t.k[:, ::group], t.k_scale, t)
    return blocks.scatter(dq, q), blocks.scatter(dk, k), blocks.scatter(_sum_groups(dv, group), v)


def _sum_groups(x_SNKH: Tensor, group: int) -> Tensor:
    return x_SNKH.unflatten(1, (-1, group)).sum(2)


def _adjoint(dx: Tensor, x: Tensor, scale: Tensor | None, t: _Tiles) -> Tensor:
    """Of norm and turn: a turn keeps lengths, so the norm's projection may come before the turn back."""
    if scale is not None:
        dx = (dx - x * (dx * x).mean(-1, keepdim=True)) * scale
    return _turn(dx, t.cos, None if t.sin is None else -t.sin)
