"""What every attention operator takes after its tensors: the schema, the arguments by name, and what they mean.

`SETTINGS`, the fields of `Settings` and `settings_of` belong together; operators of other folders put their own
tensors around them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from gemworks.jagged._dense import Align, Mask
from gemworks.jagged._packing import Plan, Side, make_plan
from gemworks.jagged.ops.attention_core.reference import Rule
from gemworks.jagged.schedule import TileSchedule
from torch import Tensor

# int64 positions would overflow if an unbounded window were added to them; no sequence is this long.
UNBOUNDED = 1 << 30
SETTINGS = (
    "Tensor? offsets_q, Tensor? offsets_k, Tensor[] tiles, str heights, SymInt num_sequences, SymInt rows_k, "
    "int max_length_q, int max_length_k, float scale, str activation, int left, int right, str align, "
    "bool shared_query"
)


class Settings(NamedTuple):
    """The arguments of `SETTINGS`.

    Attributes:
        offsets_q: [B + 1]; None with a shared query.
        offsets_k: [B + 1]; None for self-attention, and where every sequence has `rows_k` keys.
        tiles, heights: of a `TileSchedule`; [] and "" let the kernels build their own.
        rows_k: -1 unless every sequence has that many keys.
        left, right: of the mask; `UNBOUNDED` for no bound.
    """

    offsets_q: Tensor | None
    offsets_k: Tensor | None
    tiles: list[Tensor]
    heights: str
    num_sequences: int
    rows_k: int
    max_length_q: int
    max_length_k: int
    scale: float
    activation: str
    left: int
    right: int
    align: Align
    shared_query: bool


def settings_of(side_q: Side, side_k: Side, num_sequences: int, rule: Rule, schedule: TileSchedule | None) -> Settings:
    """Of one call; `side_k` is `side_q` itself for self-attention."""
    if schedule is not None and not torch.compiler.is_compiling():
        if not isinstance(schedule, TileSchedule):
            raise ValueError(
                f"schedule: got {type(schedule).__name__}, expected a TileSchedule; TileSchedule.build makes one"
            )
        offsets = side_k.offsets if side_q.offsets is None else side_q.offsets
        schedule.check(
            "schedule", num_sequences=num_sequences, total_q=side_q.total, total_k=side_k.total,
            device=None if offsets is None else offsets.device,
        )  # fmt: skip
    return Settings(
        side_q.offsets, None if side_k is side_q else side_k.offsets, *tiles_of(schedule), num_sequences,
        -1 if side_k.rows is None else side_k.rows, side_q.max_length, side_k.max_length, rule.scale, rule.activation,
        min(rule.mask.left, UNBOUNDED), min(rule.mask.right, UNBOUNDED), rule.mask.align, rule.shared_query,
    )  # fmt: skip


def tiles_of(schedule: TileSchedule | None) -> tuple[list[Tensor], str]:
    """`tiles` and `heights`."""
    return ([], "") if schedule is None else (list(schedule.tensors), schedule.heights)


class Call:
    """Settings in the terms of the reference and of the kernels."""

    def __init__(self, q: Tensor, k: Tensor, settings: Settings) -> None:
        s, full = settings, Mask()
        left, right = full.left if s.left >= UNBOUNDED else s.left, full.right if s.right >= UNBOUNDED else s.right
        self.rule = Rule(s.scale, s.activation, Mask(left, right, s.align), s.shared_query)
        self.num_sequences = s.num_sequences
        self.tiles, self.heights = s.tiles, s.heights
        if s.shared_query:
            self.side_q = Side(s.num_sequences * q.shape[0], rows=q.shape[0])
        else:
            self.side_q = Side(q.shape[0], offsets=s.offsets_q, max_length=s.max_length_q)
        if s.rows_k >= 0:
            self.side_k = Side(k.shape[0], rows=s.rows_k)
        elif s.offsets_k is None:
            self.side_k = self.side_q
        else:
            self.side_k = Side(k.shape[0], offsets=s.offsets_k, max_length=s.max_length_k)

    @property
    def bound_k(self) -> int:
        """Of the lengths of the keys."""
        return self.side_k.max_length if self.side_k.rows is None else self.side_k.rows

    def plan(self, q: Tensor, k: Tensor) -> Plan:
        return make_plan(self.side_q, self.side_k, self.num_sequences, q.shape[1], k.shape[1], q.device)
