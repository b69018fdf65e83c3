"""One event type: from ids, floats and timestamps to packed tokens, and what says when and where each token is.

Letters: T packed events of one type, C float columns, W embedding width, M = ids * W + C merged width, D width of the
event type, H head width, S = B + 1 offsets.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from gemworks.gem.config import EventSizes, ModelConfig
from gemworks.gem.flop_costs import merged_width
from gemworks.gem.kernels import KernelConfig
from gemworks.gem.model.layers import linear, normal, unit_rms
from gemworks.gem.model.plain import pad_rows, slots
from gemworks.gem.model.sequence_plan import SequencePlan, make_plan
from gemworks.jagged import Rope, RopeTables
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:  # its ids need torchrec, which the layers alone do without
    from gemworks.gem.schema import Events, EventType


@dataclass(frozen=True)
class Sequence:
    """Packed tokens of one event type on their way through the layers.

    Attributes:
        s_TD: tokens.
        offsets_S: int64.
        max_length: bound of the lengths, known on the host.
        rope: rotations of all tokens for this type's head width; None with bucketed encodings.
        plan: what the layers share.
        lengths_B: None for packed tokens. Else the batch is padded: T = B * max_length, offsets are multiples of
            max_length, and the first `lengths_B[b]` rows of sample b are real.
        late_TD: what is still to be added to the tokens; see `KernelConfig.late_residual`.
    """

    s_TD: Tensor
    offsets_S: Tensor
    max_length: int
    rope: RopeTables | None
    plan: SequencePlan = field(default_factory=SequencePlan)
    lengths_B: Tensor | None = None
    late_TD: Tensor | None = None

    def replace_tokens(self, s_TD: Tensor, late_TD: Tensor | None = None) -> Sequence:
        # spelled out, not dataclasses.replace: torch.compile follows it
        return Sequence(s_TD, self.offsets_S, self.max_length, self.rope, self.plan, self.lengths_B, late_TD)

    def summed(self) -> Sequence:
        """With nothing left to add."""
        return self if self.late_TD is None else self.replace_tokens(self.s_TD + self.late_TD)


class MaskNetMerge(nn.Module):
    """`s = RMSNorm(mlp(cat * sigmoid(mask_mlp(cat))))` of columns that together are [T, M], to [T, D].

    Source: Kunlun, arXiv 2602.10016, after MaskNet (Wang et al., arXiv 2102.07619). `mlp` is one linear layer: all that
    follows is deep.
    """

    def __init__(self, num_in: int, hidden: int, dim: int, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.mask_up = linear(num_in, hidden, gain=2.0, device=device)
        self.mask_down = linear(hidden, num_in, device=device)
        self.out = linear(num_in, dim, gain=8.0, device=device)

    def forward(self, *columns: Tensor) -> Tensor:
        # Tensor cores read rows on 16-byte boundaries; a width between them takes kernels of half the speed.
        return self.merge(columns, multiple=8 if columns[0].is_cuda else 1)

    def merge(self, columns: abc.Sequence[Tensor], *, multiple: int) -> Tensor:
        """`forward`, with the columns padded by zeros to a multiple of this many."""
        layers = (self.mask_up, self.mask_down, self.out)
        num_in = self.mask_up.in_features
        padding = -num_in % multiple if all(type(layer) is nn.Linear for layer in layers) else 0
        if not padding:
            cat_TM = torch.cat(list(columns), dim=1)
            mask_TM = torch.sigmoid(self.mask_down(torch.relu(self.mask_up(cat_TM))))
            return unit_rms(self.out(cat_TM * mask_TM))
        cat_TM = torch.cat([*columns, columns[0].new_zeros(columns[0].shape[0], padding)], dim=1)
        up = functional.pad(self.mask_up.weight, (0, padding))
        down = functional.pad(self.mask_down.weight, (0, 0, 0, padding))
        mask_Th = torch.relu(functional.linear(cat_TM, up, self.mask_up.bias))
        mask_TM = torch.sigmoid(functional.linear(mask_Th, down, functional.pad(self.mask_down.bias, (0, padding))))
        out = functional.pad(self.out.weight, (0, padding))
        return unit_rms(functional.linear(cat_TM * mask_TM, out, self.out.bias))


class BucketEncoding(nn.Module):
    """Learned tables of position (from the newest event) and of age, in buckets, added to the tokens.

    Bucket of a position p: floor(4 log2(1 + p)); of an age dt: floor(4 log(1 + dt / scale)); capped at the last row.
    """

    def __init__(self, num_buckets: int, dim: int, scale_seconds: float, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.scale_seconds = scale_seconds
        self.position_RD = normal(num_buckets, dim, std=0.1, device=device)
        self.age_RD = normal(num_buckets, dim, std=0.1, device=device)

    def forward(self, position_T: Tensor, age_seconds_T: Tensor) -> Tensor:
        last = self.position_RD.shape[0] - 1
        position_bucket_T = (4.0 * torch.log2(1.0 + position_T)).long().clamp(max=last)
        age_bucket_T = (4.0 * torch.log1p(age_seconds_T / self.scale_seconds)).long().clamp(max=last)
        return self.position_RD[position_bucket_T] + self.age_RD[age_bucket_T]


class EventTokens(nn.Module):
    """Everything of one event type before the first layer."""

    def __init__(
        self,
        event: EventType,
        sizes: EventSizes,
        config: ModelConfig,
        kernels: KernelConfig,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sizes, self.config, self.kernels = sizes, config, kernels
        # An event without ids and floats still says that it happened, and when: its merge gets a constant column.
        self.has_columns = bool(event.ids or event.float_names)
        num_merged = merged_width(event, config.embedding_dim)
        self.merge = MaskNetMerge(num_merged, config.mask_dim, sizes.dim, device=device)
        self.head_dim = sizes.head_dim
        self.rope = self.buckets = None
        if config.time_encoding == "rotary":
            self.rope = Rope(time_fraction=config.time_fraction, time_scale=config.time_scale_seconds)
        else:
            self.buckets = BucketEncoding(config.num_time_buckets, sizes.dim, config.time_scale_seconds, device=device)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids_TW: list[Tensor], events: Events, timestamps_B: Tensor) -> Sequence:
        """Tokens of one event type.

        Args:
            ids_TW: the embedding rows of each id feature.
            events: floats, timestamps and offsets.
            timestamps_B: int64, the samples' own.
        """
        total = events.timestamps_T.shape[0]
        columns = [*ids_TW, events.floats_TC] if self.has_columns else [events.floats_TC.new_ones(total, 1)]
        s_TD = self.merge(*columns)
        if self.kernels.stream == "float32":
            s_TD = s_TD.float()
        offsets_S, max_length = events.offsets_S, events.max_length
        lengths_B = offsets_S.diff()
        sample_T = torch.repeat_interleave(lengths_B, output_size=total)
        age_T = (timestamps_B[sample_T] - events.timestamps_T).clamp(min=0)
        if self.buckets is not None:
            position_T = offsets_S[1:][sample_T] - 1 - torch.arange(total, device=sample_T.device)
            s_TD = s_TD + self.buckets(position_T, age_T)
        s_TD = self.dropout(s_TD)
        plan = SequencePlan()
        if self.kernels.layout == "padded":
            batch = lengths_B.shape[0]
            slot_T, total = slots(offsets_S, sample_T, max_length), batch * max_length
            s_TD, age_T = pad_rows(s_TD, slot_T, total), pad_rows(age_T, slot_T, total)
            offsets_S = torch.arange(batch + 1, device=offsets_S.device) * max_length
        else:
            plan = make_plan(offsets_S, sample_T, max_length, self.sizes, self.config, self.kernels)
        rope = None if self.rope is None else self.rotations(offsets_S, age_T)
        padded = lengths_B if self.kernels.layout == "padded" else None
        return Sequence(s_TD, offsets_S, max_length, rope, plan, padded)

    def rotations(self, offsets_S: Tensor, age_T: Tensor) -> RopeTables:
        """Cosines and sines of all tokens, by position and age; of an event type with rotations."""
        assert self.rope is not None
        dtype = torch.float16 if self.kernels.rope_tables == "float16" else torch.float32
        return self.rope.tables(offsets_S, self.head_dim, total=age_T.shape[0], dt=age_T, dtype=dtype)
