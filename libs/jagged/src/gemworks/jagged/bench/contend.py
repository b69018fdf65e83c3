"""Who takes part in a case, and a contender made ready: checked first, then closures to time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from gemworks.jagged.bench import report
from gemworks.jagged.bench.cases import Case, Inputs
from gemworks.jagged.bench.checks import check
from gemworks.jagged.bench.peers import Contender, Maker

# What a peer costs before it runs: FlexAttention compiles for every shape, others tune at every length, cuDNN plans for
# every padded batch. Targets are measured beside all of them; what else is promised a row, beside what starts at once.
SLOW_TO_COMPILE = ("FlexAttention",)
QUICK_PEERS = ("torch varlen_attn", "flash-attn-4", "HSTU Triton")


def left_out(name: str, case: Case, *, everything: bool) -> str:
    """Why this contender does not take part in this case, or an empty string."""
    main = case.priority == 0
    if everything or name.startswith(report.OURS):
        return ""
    if name in SLOW_TO_COMPILE and not (main and case.kind == "self" and not case.window):
        return "left out: it compiles for every shape; --all-peers measures it here too"
    if not main and name not in QUICK_PEERS:
        return "left out: it tunes or plans for every shape; --all-peers measures it here too"
    return ""


def closures(x: Inputs, contender: Contender) -> dict[str, Callable[[], object]]:
    leaves = x.leaves if contender.leaves is None else contender.leaves
    out = contender.attend(*leaves)
    d_out = x.d_out if contender.unpack is None else torch.randn_like(out)

    def forward() -> object:
        with torch.no_grad():
            return contender.attend(*leaves)

    return {"fwd": forward, "bwd": lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)}


def set_up(name: str, make: Maker, x: Inputs) -> dict[str, Callable[[], object]]:
    """Forward and backward of one contender, whose results have been checked.

    Raises:
        Exception: whatever a peer raises; AssertionError where its results are wrong.
    """
    contender = make(x)
    if contender.leaves is None and x.case.kind == "pool" and not name.startswith(report.OURS):
        # Peers have no shared query: they get it repeated, and the copying is not theirs to pay for.
        repeated = x.q.detach().repeat(x.case.batch, 1, 1).requires_grad_()
        contender = replace(contender, leaves=[repeated, x.k, x.v])
    check(x, contender)
    return closures(x, contender)
