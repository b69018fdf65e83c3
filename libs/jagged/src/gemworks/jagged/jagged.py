"""`Jagged`: packed values, offsets and a bound of the lengths that the host knows.

Letters: T packed rows, B sequences, S = B + 1 offsets, L padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from gemworks.jagged._checks import check_max_length, check_offsets
from torch import Tensor
from torch.utils import _pytree as pytree


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n, and 1 for n <= 1.

    >>> [next_power_of_two(n) for n in (0, 1, 2, 3, 64, 65)]
    [1, 1, 2, 4, 64, 128]
    """
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True, eq=False)
class Jagged:
    """A batch of sequences of different lengths, packed without padding.

    `max_length` is an upper bound of the lengths, rounded up to a power of two so that neighbouring batches share
    compiled code. It comes from the reader or the config and is never read from device memory.

    Args:
        values: [T, ...]; rows of sequence b are `values[offsets[b]:offsets[b + 1]]`. Rows past `offsets[-1]` belong to
            no sequence.
        offsets: int32 or int64 [S], starting at 0, non-decreasing.
        max_length: a bound of the lengths.

    Raises:
        ValueError: the offsets are not a row partition of the values (their values are checked on the host only).

    >>> j = Jagged.from_lengths(torch.arange(5.0), torch.tensor([2, 0, 3]))
    >>> j.offsets.tolist(), j.max_length, [s.tolist() for s in j.unbind()]
    ([0, 2, 2, 5], 4, [[0.0, 1.0], [], [2.0, 3.0, 4.0]])
    """

    values: Tensor
    offsets: Tensor
    max_length: int

    def __post_init__(self) -> None:
        bound = check_max_length("max_length", self.max_length)
        if self.values.dim() == 0:
            raise ValueError("values: got a scalar, expected [T, ...]; give it a row dimension with .reshape(1)")
        check_offsets("offsets", self.offsets, total=self.values.shape[0], max_length=bound, device=self.values.device)
        object.__setattr__(self, "max_length", next_power_of_two(bound))

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.offsets.shape[0] - 1

    @property
    def total(self) -> int:
        """T: packed rows, known on the host."""
        return self.values.shape[0]

    @property
    def lengths(self) -> Tensor:
        """[B], dtype of the offsets."""
        return self.offsets.diff()

    @property
    def device(self) -> torch.device:
        return self.values.device

    def with_values(self, values: Tensor) -> Jagged:
        """The same sequences with other values [T, ...]."""
        return Jagged(values, self.offsets, self.max_length)

    def to(self, *args: Any, **kwargs: Any) -> Jagged:
        """Values converted as by `Tensor.to`; offsets follow to the device and keep their dtype."""
        values = self.values.to(*args, **kwargs)
        offsets = self.offsets.to(values.device, non_blocking=bool(kwargs.get("non_blocking", False)))
        return Jagged(values, offsets, self.max_length)

    def unbind(self) -> list[Tensor]:
        """One [length, ...] view per sequence. Reads the offsets: host data only.

        Raises:
            ValueError: the offsets are on a device.
        """
        if self.offsets.device.type != "cpu":
            raise ValueError(f"unbind: offsets on {self.offsets.device} would stall the stream; call .to('cpu') first")
        bounds = self.offsets.tolist()
        return [self.values[a:b] for a, b in pairwise(bounds)]

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor, max_length: int | None = None) -> Jagged:
        """From packed values [T, ...] and lengths [B] (int32 or int64)."""
        from gemworks.jagged.convert import from_lengths

        return from_lengths(values, lengths, max_length)

    @classmethod
    def from_list(cls, sequences: Sequence[Tensor], max_length: int | None = None) -> Jagged:
        """From one [length, ...] tensor per sequence."""
        from gemworks.jagged.convert import from_list

        return from_list(sequences, max_length)

    @classmethod
    def from_padded(
        cls,
        padded: Tensor,
        lengths: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        max_length: int | None = None,
        total: int | None = None,
    ) -> Jagged:
        """From padded [B, L, ...] and lengths [B] or a mask [B, L]; see `convert.from_padded`."""
        from gemworks.jagged.convert import from_padded

        return from_padded(padded, lengths, mask=mask, max_length=max_length, total=total)

    def to_padded(self, length: int | None = None, *, value: float = 0.0) -> Tensor:
        """[B, L, ...]; see `convert.to_padded`."""
        from gemworks.jagged.convert import to_padded

        return to_padded(self, length, value=value)


def _flatten(j: Jagged) -> tuple[list[Any], int]:
    return [j.values, j.offsets], j.max_length


def _unflatten(children: Any, max_length: int) -> Jagged:
    # Children may be placeholders (tree_map over None, fake tensors): a pytree must rebuild without checks.
    values, offsets = children
    out = object.__new__(Jagged)
    object.__setattr__(out, "values", values)
    object.__setattr__(out, "offsets", offsets)
    object.__setattr__(out, "max_length", max_length)
    return out


def _flatten_with_keys(j: Jagged) -> tuple[list[tuple[Any, Any]], int]:
    return [(pytree.GetAttrKey("values"), j.values), (pytree.GetAttrKey("offsets"), j.offsets)], j.max_length


pytree.register_pytree_node(
    Jagged,
    _flatten,
    _unflatten,
    serialized_type_name="gemworks.jagged.Jagged",
    flatten_with_keys_fn=_flatten_with_keys,
)
