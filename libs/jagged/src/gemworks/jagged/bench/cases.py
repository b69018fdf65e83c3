"""What is measured: shapes, laws of lengths, inputs, FLOPs and bytes.

Letters: B sequences, T packed rows, N heads, H head width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from gemworks.jagged import TileSchedule, attention_flops, num_pairs, offsets_from_lengths
from torch import Tensor

BWD_FACTOR = 2.5
LAWS = ("uniform", "mean70", "zipf12", "full", "empties", "ones")


def draw_lengths(law: str, batch: int, maximum: int, seed: int) -> Tensor:
    """Lengths [B].

    uniform: on [1, max]. mean70: uniform on [0.4 max, max]. zipf12: P(n) ~ n^-1.2 on [1, max]. full: all the longest.
    empties, ones: those that uniform draws for B / 4 sequences, and after each of them three of no or one row.
    """
    generator = torch.Generator().manual_seed(seed)
    if law == "full":
        return torch.full((batch,), maximum)
    if law == "uniform":
        return torch.randint(1, maximum + 1, (batch,), generator=generator)
    if law == "mean70":
        return torch.randint(max(1, int(0.4 * maximum)), maximum + 1, (batch,), generator=generator)
    if law == "zipf12":
        weights = torch.arange(1, maximum + 1, dtype=torch.float64) ** -1.2
        return torch.multinomial(weights, batch, replacement=True, generator=generator) + 1
    if law in ("empties", "ones"):
        lengths = torch.full((batch // 4, 4), int(law == "ones"))
        lengths[:, 0] = draw_lengths("uniform", batch // 4, maximum, seed)
        return lengths.flatten()
    raise ValueError(f"law: got {law!r}, expected one of {', '.join(LAWS)}")


@dataclass(frozen=True)
class Case:
    """One shape of one op.

    Attributes:
        kind: self, pffn (short keys of its own for each sample) or pool (a shared query over long keys).
        rows: keys per sample (pffn) or shared queries (pool).
        window: 0 for none.
        activation: of gdpa.
        priority: 0 is measured first, where time may run out.
    """

    op: str
    kind: str
    batch: int
    maximum: int
    law: str = "uniform"
    head_dim: int = 128
    rows: int = 0
    window: int = 0
    causal: bool = False
    activation: str = "fast_gelu"
    heads: int = 4
    seed: int = 1
    priority: int = 1

    @property
    def shape(self) -> str:
        extra = {"self": "", "pffn": f" kv{self.rows}", "pool": f" seeds{self.rows}"}[self.kind]
        extra += f" window{self.window}" if self.window else ""
        extra += " causal" if self.causal else ""
        extra += "" if self.computes in ("softmax", "fast_gelu") else f" {self.activation}"
        return f"B{self.batch} max{self.maximum}{extra}"

    @property
    def computes(self) -> str:
        """The activation of `gdpa`, or softmax."""
        return "softmax" if self.op == "flash_attention" else self.activation

    @property
    def inputs(self) -> Case:
        """This case without what is ours alone: cases that agree in it share inputs, peers and peers' times."""
        return replace(self, op="", activation="", priority=0)


BOTH = ("flash_attention", "gdpa")
SWEEP_LAWS = ("uniform", "mean70", "zipf12")
# The targets of the kernels come first; then what else is promised a row; then the sweep.
CASES: tuple[Case, ...] = (
    *(Case(op, "self", b, n, priority=0) for b, n in ((256, 1024), (128, 2048)) for op in BOTH),
    Case("gdpa", "pffn", 256, 2048, "full", rows=256, priority=0),
    Case("gdpa", "pool", 128, 2048, rows=256, priority=0),
    Case("gdpa", "pool", 128, 2048, rows=64, priority=0),
    Case("flash_attention", "self", 128, 2048, window=100, priority=0),
    *(Case("gdpa", "self", b, n, causal=True, activation="silu") for b, n in ((256, 1024), (128, 2048))),
    *(Case("flash_attention", "self", b, n, causal=True) for b, n in ((256, 1024), (128, 2048))),
    *(Case(op, "self", 16, 16384) for op in BOTH),
    *(Case("gdpa", kind, 16, 16384, rows=256) for kind in ("pffn", "pool")),
    Case("gdpa", "pffn", 256, 1024, rows=256),
    Case("gdpa", "pffn", 256, 1024, rows=128),
    *(Case("flash_attention", "pool", 128, 2048, rows=n) for n in (64, 256)),
    *(Case(op, "self", 1024, 1024, law, priority=1) for law in ("empties", "ones") for op in BOTH),
    *(Case(op, "self", 256, n, priority=2) for n in (256, 512) for op in BOTH),
    *(Case(op, "self", 64, 4096, "full", priority=2) for op in BOTH),
    *(Case(op, "self", 1152, 2000, "mean70", priority=2) for op in BOTH),
    *itertools.chain.from_iterable(
        (
            *(Case(op, "self", batch, n, law, width, priority=3) for n in (1024, 256, 4096) for op in BOTH),
            *(Case("gdpa", "pffn", batch, 1024, law, width, rows, priority=3) for rows in (256, 128)),
        )
        for law, width, batch in itertools.product(SWEEP_LAWS, (128, 64), (256, 1152))
    ),
)
SMOKE: tuple[Case, ...] = (
    Case("flash_attention", "self", 3, 16, heads=2, head_dim=16),
    Case("gdpa", "pffn", 3, 16, heads=2, head_dim=16, rows=4),
    Case("gdpa", "pool", 3, 16, heads=2, head_dim=16, rows=4),
    Case("flash_attention", "self", 3, 16, heads=2, head_dim=16, window=3),
    Case("gdpa", "self", 3, 16, heads=2, head_dim=16),
    Case("gdpa", "self", 3, 16, heads=2, head_dim=16, causal=True, activation="silu"),
)


def grouped(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases with the same inputs together, in the order of the most urgent of each group; each case once."""
    groups: dict[Case, dict[Case, Case]] = {}
    for case in sorted(cases, key=lambda c: c.priority):
        groups.setdefault(case.inputs, {}).setdefault(replace(case, priority=0), case)
    return [list(group.values()) for group in groups.values()]


@dataclass(frozen=True)
class Inputs:
    """Leaves and cotangent of one case on the device."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    lengths_q: Tensor  # on the host
    lengths_k: Tensor
    offsets_q: Tensor | None
    offsets_k: Tensor | None
    schedule: TileSchedule
    scale: float
    flops: int  # forward, on admitted pairs

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v]

    def bytes_moved(self, direction: str) -> int:
        """The least that must cross the memory bus."""
        inputs = sum(x.numel() for x in self.leaves)
        out = self.d_out.numel()
        each = self.q.element_size()
        return each * (inputs + out if direction == "fwd" else 2 * inputs + 2 * out)


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype) -> Inputs:
    torch.manual_seed(case.seed)
    lengths = draw_lengths(case.law, case.batch, case.maximum, case.seed)
    offsets = offsets_from_lengths(lengths).to(torch.int32).to(device)
    total, n, h = int(lengths.sum()), case.heads, case.head_dim

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()

    offsets_q: Tensor | None = offsets
    offsets_k: Tensor | None = None
    lengths_q = lengths_k = lengths
    if case.kind == "self":
        q, k, v = randn(total, n, h), randn(total, n, h), randn(total, n, h)
        out_rows = total
        schedule = TileSchedule.build(offsets, total_q=total)
    elif case.kind == "pffn":
        q, k, v = randn(total, n, h), randn(case.batch, case.rows, n, h), randn(case.batch, case.rows, n, h)
        lengths_k, out_rows = torch.full_like(lengths, case.rows), total
        schedule = TileSchedule.build(offsets, total_q=total, rows_k=case.rows)
    else:
        q, k, v = randn(case.rows, n, h), randn(total, n, h), randn(total, n, h)
        offsets_q, offsets_k = None, offsets
        lengths_q, out_rows = torch.full_like(lengths, case.rows), case.batch * case.rows
        schedule = TileSchedule.build(None, offsets, total_q=case.rows, total_k=total)
    pairs = int(num_pairs(lengths_q, lengths_k, window=case.window or None, causal=case.causal))
    return Inputs(
        case,
        q,
        k,
        v,
        torch.randn(out_rows, n, h, device=device, dtype=dtype),
        lengths_q,
        lengths_k,
        offsets_q,
        offsets_k,
        schedule,
        1.0 / math.sqrt(h),
        attention_flops(pairs, n, h),
    )
