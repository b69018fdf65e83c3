"""A contender's output and gradients against the definition, densely and in float32, before any of it is timed."""

from __future__ import annotations

import torch
from gemworks.jagged.bench.cases import Inputs
from gemworks.jagged.bench.peers import Contender
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS
from torch import Tensor

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


def definition(x: Inputs, b: int, contender: Contender) -> list[Tensor]:
    """[out, dq, dk, dv] of one sequence."""
    begin_q, begin_k = int(x.lengths_q[:b].sum()), int(x.lengths_k[:b].sum())
    rows_q = slice(begin_q, begin_q + int(x.lengths_q[b]))
    rows_k = slice(begin_k, begin_k + int(x.lengths_k[b]))
    keys, values = (t[b] if t.dim() == 4 else t[rows_k] for t in (x.k, x.v))
    queries = x.q if x.case.kind == "pool" else x.q[rows_q]
    q, k, v = (t.detach().float().requires_grad_() for t in (queries, keys, values))
    logits = (x.scale if contender.logit_scale is None else contender.logit_scale) * torch.einsum("qnh,knh->nqk", q, k)
    softmax = contender.activation == "softmax"
    hidden = None
    if x.case.window or x.case.causal:
        away = torch.arange(k.shape[0], device=k.device) - torch.arange(q.shape[0], device=q.device)[:, None]
        hidden = away > 0 if x.case.causal else away.abs() >= x.case.window
    if softmax:
        weights = (logits if hidden is None else logits.masked_fill(hidden, float("-inf"))).softmax(-1)
    else:
        assert contender.activation is not None
        weights = ACTIVATIONS[contender.activation](logits)
        weights = weights if hidden is None else weights * ~hidden
    out = contender.out_scale * torch.einsum("nqk,knh->qnh", weights, v)
    grads = torch.autograd.grad(out, (q, k, v), x.d_out[rows_q].float())
    return [out.detach(), *grads]


def check(x: Inputs, contender: Contender) -> None:
    """Raise AssertionError unless output and gradients of the shortest, a middle and the longest sequence are right.

    A peer that unpacks its result (padded rows) is checked in the forward; the gradient of a shared query, which peers
    take repeated, is left out.
    """
    leaves = x.leaves if contender.leaves is None else contender.leaves
    if contender.unpack is not None:
        with torch.no_grad():
            results = [contender.unpack(contender.attend(*leaves))]
    else:
        out = contender.attend(*leaves)
        results = [out, *torch.autograd.grad(out, leaves, x.d_out)]
    if contender.activation is None:  # of an activation that nobody knows, only finiteness can be asked
        assert all(bool(t.isfinite().all()) for t in results), "not finite"
        return
    order = x.lengths_q.argsort() if x.case.kind == "self" else x.lengths_k.argsort()
    tolerance = TOLERANCE[x.q.dtype]
    for b in {int(order[0]), int(order[len(order) // 2]), int(order[-1])}:
        truth = definition(x, b, contender)
        for i, (name, exact) in enumerate(zip(("out", "dq", "dk", "dv"), truth, strict=True)):
            if i >= len(results) or (name == "dq" and x.case.kind == "pool"):
                continue
            lengths = x.lengths_k if i >= 2 else x.lengths_q
            begin = int(lengths[:b].sum())
            got = results[i].flatten(0, 1) if results[i].dim() == 4 else results[i]
            got = got[begin : begin + int(lengths[b])].detach().float()
            error = float((got - exact).norm() / exact.norm().clamp(min=1e-20))
            # Of a row that sees one key, softmax has no gradient: compare with the size of the cotangent instead.
            if float(exact.norm()) > 1e-3 * contender.out_scale * float(x.d_out[:1].float().norm()):
                assert error <= tolerance, (
                    f"{name} of sequence {b} ({int(lengths[b])} rows): relative error {error:.1e}"
                )
