"""Quantisation of jagged arrays along their row dim: blocks never cross a group, and nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gemworks.precision.checks import check_instance, check_same_device, check_tensor
from gemworks.precision.formats import Format
from gemworks.precision.hadamard import Hadamard
from gemworks.precision.mxtensor import MXTensor
from gemworks.precision.quantization import ROW_BLOCK_SIZES, check_input, quantize
from gemworks.precision.rng import Stochastic
from gemworks.precision.scales import ScaleMode
from torch import Tensor


@dataclass(frozen=True)
class JaggedMX:
    """A plane along the rows of a jagged array, every group padded to whole blocks with zero rows.

    Attributes:
        plane: codes `[P, K]` and scales `[P / block, K]` with `P = padded_rows(T, S, align)`.
        padded_offsets: int64 `[S + 1]`, where each padded group starts; on the device of the data.
        offsets: int64 `[S + 1]`, the groups in the original array.
    """

    plane: MXTensor
    padded_offsets: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.plane, MXTensor):
            raise ValueError(f"plane: got {type(self.plane).__name__}, expected an MXTensor; use quantize_jagged")

    def dequantize(self, num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Back to `[num_rows, K]` packed rows; rows past `offsets[-1]` are zero."""
        values = self.plane.dequantize(dtype)
        return unpad_rows(values, self.offsets, self.padded_offsets, num_rows)


def padded_rows(num_rows: int, num_groups: int, align: int) -> int:
    """Rows that suffice for any split of `num_rows` over `num_groups`, every group rounded up to `align`: known on the
    host without reading the offsets."""
    return (num_rows + num_groups * (align - 1)) // align * align


def pad_offsets(offsets: Tensor, align: int) -> Tensor:
    """Offsets of the same groups once each is rounded up to a multiple of `align`.

    >>> pad_offsets(torch.tensor([0, 5, 5, 70]), 32).tolist()
    [0, 32, 32, 128]
    """
    lengths = offsets.to(torch.int64).diff()
    padded = (lengths + align - 1) // align * align
    return torch.nn.functional.pad(padded.cumsum(0), (1, 0))


def pad_rows(x: Tensor, offsets: Tensor, align: int) -> tuple[Tensor, Tensor]:
    """Spread the groups of a packed array over a buffer in which each starts at a multiple of `align`.

    Rows of `x` past `offsets[-1]` are never read (they may hold anything), padding rows are zero, no host sync.

    Args:
        x: `[T, ...]` packed rows.
        offsets: int `[S + 1]`, on x's device.

    Returns:
        `[padded_rows(T, S, align), ...]` and the padded offsets.
    """
    check_offsets(x, offsets)
    return pad_rows_unchecked(x, offsets, align)


def pad_rows_unchecked(x: Tensor, offsets: Tensor, align: int) -> tuple[Tensor, Tensor]:
    """`pad_rows` with offsets that were looked at before."""
    num_groups = offsets.shape[0] - 1
    starts = pad_offsets(offsets, align)
    total = padded_rows(x.shape[0], num_groups, align)
    position = torch.arange(total, device=x.device)
    group = (torch.searchsorted(starts, position, right=True) - 1).clamp(0, num_groups - 1)
    source = offsets[group] + position - starts[group]
    valid = source < offsets[group + 1]
    return _take_rows(x, source, valid), starts


def unpad_rows(padded: Tensor, offsets: Tensor, padded_offsets: Tensor, num_rows: int) -> Tensor:
    """Inverse of `pad_rows`: `[num_rows, ...]`, zero past `offsets[-1]`."""
    num_groups = offsets.shape[0] - 1
    position = torch.arange(num_rows, device=padded.device)
    group = (torch.searchsorted(offsets.to(torch.int64), position, right=True) - 1).clamp(0, num_groups - 1)
    source = padded_offsets[group] + position - offsets[group]
    return _take_rows(padded, source, position < offsets[-1])


def quantize_jagged(
    x: Tensor,
    offsets: Tensor,
    format: str | Format = Format.E4M3,
    scale_mode: str | ScaleMode = ScaleMode.RCEIL,
    *,
    block: int = 32,
    stochastic: Stochastic | None = None,
    hadamard: Hadamard | None = None,
) -> JaggedMX:
    """Quantise along the rows of each group: the operand of a grouped weight gradient.

    Args:
        x: `[T, K]` packed rows; T need not be a multiple of anything, groups may be empty.
        offsets: int32 or int64 `[S + 1]` on x's device, `offsets[0] = 0`.
        block, format, scale_mode, stochastic, hadamard: as in `quantize`; groups are padded to the Hadamard size.

    Returns:
        The padded plane with both sets of offsets. The same codes as `quantize(group, dim=0)` of every group.

    Raises:
        ValueError: as `quantize`, other than 2 dims, or offsets that do not split x's rows (their values are looked at
            on a CPU alone).
    """
    check_input(x, 0, block, ROW_BLOCK_SIZES)
    if x.dim() != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected packed rows [T, K]; flatten the trailing dims first")
    check_instance("hadamard", hadamard, Hadamard, "Hadamard(32, seed=0)")
    align = max(block, hadamard.size if hadamard is not None else 1)
    padded, starts = pad_rows(x, offsets, align)
    plane = quantize(padded, 0, format, scale_mode, block=block, stochastic=stochastic, hadamard=hadamard)
    return JaggedMX(plane, starts, offsets)


def _take_rows(x: Tensor, source: Tensor, valid: Tensor) -> Tensor:
    mask = valid.reshape(-1, *([1] * (x.dim() - 1)))
    if x.shape[0] == 0:
        return x.new_zeros((source.shape[0], *x.shape[1:]))
    # where, not a product: whatever an unread row holds, NaN included, must not reach the result.
    return torch.where(mask, x[source.clamp(0, x.shape[0] - 1)], torch.zeros((), dtype=x.dtype, device=x.device))


def check_offsets(x: Tensor, offsets: Tensor) -> None:
    """Raise ValueError for what are no offsets of groups of x's rows. On a CPU their values are looked at too; on a GPU
    that would wait for the device."""
    check_tensor("offsets", offsets)
    if offsets.dim() != 1 or offsets.shape[0] < 2 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"offsets: got shape {tuple(offsets.shape)} and dtype {offsets.dtype}, "
            "expected int32 or int64 of shape [groups + 1]"
        )
    check_same_device("offsets", offsets, "x", x)
    if (
        offsets.device.type == "cpu"
        and type(offsets) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    ):
        bounds = offsets.tolist()
        if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > x.shape[0]:
            shown = ", ".join(map(str, bounds[:8])) + (", ..." if len(bounds) > 8 else "")
            raise ValueError(
                f"offsets: got [{shown}] up to {bounds[-1]}; expected 0 first, none smaller than the one before, "
                f"and no more than x's {x.shape[0]} rows; for lengths use their cumsum with a 0 in front"
            )
