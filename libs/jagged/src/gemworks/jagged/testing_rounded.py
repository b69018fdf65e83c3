"""Attention with P and dS rounded to MXFP8, as loops over sequences and heads in float64: what tests compare with."""

from __future__ import annotations

import math
from typing import Any

import torch
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS
from torch import Tensor


def round_mx(x: Tensor, dim: int) -> Tensor:
    """Each 32 along `dim` to four significant bits, at steps of no less than 2^-9 of the power that fits 448."""
    moved = x.movedim(dim, -1)
    blocks = []
    for part in moved.split(32, -1):
        top = part.abs().amax(-1, keepdim=True)
        power = torch.where(top > 0, torch.ceil(torch.log2(top.clamp(min=1e-300) / 448)), torch.zeros_like(top))
        step = 2.0 ** (torch.floor(torch.log2((part.abs() / 2.0**power).clamp(min=2.0**-6))) - 3)
        blocks.append(torch.round(part / 2.0**power / step) * step * 2.0**power)
    return torch.cat(blocks, -1).movedim(-1, dim)


def attend(
    values: tuple[Tensor, Tensor, Tensor],
    d_out: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    *,
    scale: float,
    activation: str,
    causal: bool,
    quantize_p: bool,
    quantize_ds: bool,
) -> list[Tensor]:
    """Output, dq, dk and dv in float64; `causal` is aligned at the bottom right."""
    q, k, v = (x.double() for x in values)
    d_out = d_out.double()
    group = q.shape[1] // k.shape[1]
    out, dq, dk, dv = d_out.new_zeros(*q.shape[:2], v.shape[2]), *(torch.zeros_like(x) for x in (q, k, v))

    def rounded(x: Tensor, dim: int, ask: bool) -> Tensor:
        return round_mx(x, dim) if ask else x

    for b in range(len(offsets_q) - 1):
        rows, keys = slice(*offsets_q[b : b + 2].tolist()), slice(*offsets_k[b : b + 2].tolist())
        lq, lk = rows.stop - rows.start, keys.stop - keys.start
        if lq == 0 or lk == 0:
            continue
        position = torch.arange(lq)[:, None] + lk - lq
        admitted = torch.arange(lk)[None, :] <= position if causal else torch.ones(lq, lk, dtype=torch.bool)
        for n in range(q.shape[1]):
            a, c, w, g = q[rows, n], k[keys, n // group], v[keys, n // group], d_out[rows, n]
            s = a @ c.T * scale
            dp = g @ w.T
            if activation == "softmax":
                s = torch.where(admitted, s, -math.inf)
                peak = s.amax(1, keepdim=True).nan_to_num(neginf=0.0)
                base = torch.ceil(peak * math.log2(math.e)) / math.log2(math.e)
                raw = torch.exp(s - base)
                total = raw.sum(1, keepdim=True)
                total = torch.where(total > 0, total, 1.0)
                out[rows, n] = rounded(raw, 1, quantize_p) @ w / total
                p = raw / total
                ds = p * (dp - (g * out[rows, n]).sum(1, keepdim=True))
            else:
                leaf = s.clone().requires_grad_()
                p = ACTIVATIONS[activation](leaf)
                slope: Any = torch.autograd.grad(p.sum(), leaf)[0]
                p, ds = torch.where(admitted, p.detach(), 0.0), torch.where(admitted, slope * dp, 0.0)
                out[rows, n] = rounded(p, 1, quantize_p) @ w
            dv[keys, n // group] += rounded(p, 0, quantize_p).T @ g
            dk[keys, n // group] += rounded(ds, 0, quantize_ds).T @ a * scale
            dq[rows, n] = rounded(ds, 1, quantize_ds) @ c * scale
    return [out, dq, dk, dv]


def decibels(exact: Tensor, x: Tensor) -> float:
    """Of signal over noise."""
    noise = (exact - x.double()).norm()
    return math.inf if noise == 0 else float(20 * torch.log10(exact.norm() / noise))
