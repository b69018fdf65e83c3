"""What a data source offers and what a batch holds: the one seam between readers and model.

A reader declares a `Schema`; the model is built from it. Batches carry ids as torchrec `KeyedJaggedTensor`s.

Shapes: B samples, T packed events of one type, S = B + 1 offsets, C float columns, K tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # a schema, and the dense parts of a model, do without torchrec
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True, kw_only=True)
class IdFeature:
    """One categorical field. Features that name the same `table` share its rows (`num_ids` must then agree)."""

    name: str
    num_ids: int
    table: str


@dataclass(frozen=True, kw_only=True)
class EventType:
    """One kind of event in the history (click, conversion, ...): its ids and float columns.

    Every event also has a timestamp.
    """

    name: str
    ids: tuple[IdFeature, ...]
    float_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns of a data source.

    Attributes:
        ids: categorical fields of the sample itself (user, item, context); zero or more ids each.
        dense_names: float columns of the sample.
        events: event types of the history.
        tasks: names of the binary labels; the first one is the primary task, on which models are chosen.
    """

    ids: tuple[IdFeature, ...]
    dense_names: tuple[str, ...]
    events: tuple[EventType, ...]
    tasks: tuple[str, ...]

    def event_key(self, event: str, feature: str) -> str:
        """The key of an event's id feature in `Batch.event_ids`."""
        return f"{event}/{feature}"


@dataclass
class Events:
    """The jagged events of one type in a batch, oldest first.

    Attributes:
        floats_TC: float32 [T, C].
        timestamps_T: int64 [T], seconds; non-decreasing inside a sample and smaller than the sample's own.
        offsets_S: int64 [B + 1].
        max_length: an upper bound of the lengths, a power of two, known on the host.
    """

    floats_TC: Tensor
    timestamps_T: Tensor
    offsets_S: Tensor
    max_length: int


@dataclass
class Batch:
    """One batch, on one device.

    Attributes:
        ids: keys are `Schema.ids` names, B samples each.
        event_ids: keys are `Schema.event_key(event, feature)`, B samples each; all features of an event have its
            lengths.
        dense_BC: float32 [B, C].
        timestamps_B: int64 [B], seconds: when the sample was scored.
        labels_BK: float32 [B, K] in {0, 1}.
        sample_ids_B: int64 [B]: stable identity of a sample, for resume and for duplicate checks.
        events: by event name.
    """

    ids: KeyedJaggedTensor
    event_ids: KeyedJaggedTensor
    dense_BC: Tensor
    timestamps_B: Tensor
    labels_BK: Tensor
    sample_ids_B: Tensor
    events: dict[str, Events] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        return self.labels_BK.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """A copy of the batch on `device`."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        target = torch.device(device)
        return Batch(
            ids=self.ids.to(target, non_blocking=non_blocking),
            event_ids=self.event_ids.to(target, non_blocking=non_blocking),
            dense_BC=move(self.dense_BC),
            timestamps_B=move(self.timestamps_B),
            labels_BK=move(self.labels_BK),
            sample_ids_B=move(self.sample_ids_B),
            events={
                name: Events(move(e.floats_TC), move(e.timestamps_T), move(e.offsets_S), e.max_length)
                for name, e in self.events.items()
            },
        )

    def pin_memory(self) -> Batch:
        """A copy of the batch in page-locked host memory (needs CUDA)."""
        return Batch(
            ids=self.ids.pin_memory(),
            event_ids=self.event_ids.pin_memory(),
            dense_BC=self.dense_BC.pin_memory(),
            timestamps_B=self.timestamps_B.pin_memory(),
            labels_BK=self.labels_BK.pin_memory(),
            sample_ids_B=self.sample_ids_B.pin_memory(),
            events={
                name: Events(
                    e.floats_TC.pin_memory(), e.timestamps_T.pin_memory(), e.offsets_S.pin_memory(), e.max_length
                )
                for name, e in self.events.items()
            },
        )
