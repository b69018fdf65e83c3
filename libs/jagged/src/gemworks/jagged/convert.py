"""Conversions to and from `Jagged`: lengths, lists, padded + mask, torch.nested, torchrec, cu_seqlens.

Letters: T packed rows, B sequences, L padded length. torchrec is never imported: its objects are known by methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gemworks.jagged._checks import check_offsets, is_host
from gemworks.jagged._packing import segment_ids
from gemworks.jagged.jagged import Jagged, next_power_of_two
from torch import Tensor


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Running sum of lengths [B] with a leading 0, [B + 1] in the dtype of the lengths.

    >>> offsets_from_lengths(torch.tensor([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    if not isinstance(lengths, Tensor):
        raise ValueError(
            f"lengths: got {type(lengths).__name__}, expected a Tensor [B]; torch.tensor(lengths) makes one"
        )
    if lengths.dtype not in (torch.int32, torch.int64) or lengths.dim() != 1:
        raise ValueError(
            f"lengths: got {lengths.dtype} {tuple(lengths.shape)}, expected int32 or int64 [B]; "
            f"cast with .to(torch.int64)"
        )
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])


def _bound(max_length: int | None, lengths: Tensor) -> int:
    """`max_length`, or the longest length when reading it is free."""
    if max_length is not None:
        return max_length
    if not is_host(lengths):
        raise ValueError(
            f"max_length: missing, and lengths are on {lengths.device}, where reading them would stall the stream; "
            f"pass the bound that the reader or the config knows"
        )
    return int(lengths.max()) if lengths.numel() else 0


def from_lengths(values: Tensor, lengths: Tensor, max_length: int | None = None) -> Jagged:
    """Packed values [T, ...] and lengths [B]. Raises ValueError if max_length is missing off the host."""
    return Jagged(values, offsets_from_lengths(lengths), _bound(max_length, lengths))


def from_list(sequences: Sequence[Tensor], max_length: int | None = None) -> Jagged:
    """One [length, ...] tensor per sequence, on any device (lengths come from shapes).

    >>> from_list([torch.ones(2), torch.ones(0), torch.ones(1)]).offsets.tolist()
    [0, 2, 2, 3]
    """
    if isinstance(sequences, Tensor) or not all(isinstance(s, Tensor) and s.dim() for s in sequences):
        raise ValueError(
            "sequences: got something else than a list of Tensors [length, ...]; one tensor goes through from_padded "
            "or from_lengths"
        )
    if not sequences:
        raise ValueError("sequences: got none; an empty batch has no width, build Jagged(values[:0], offsets=[0], 1)")
    lengths = torch.tensor([s.shape[0] for s in sequences])
    bound = _bound(max_length, lengths)
    if bound < int(lengths.max()):
        raise ValueError(f"max_length: got {bound}, but a sequence has {int(lengths.max())} rows; raise max_length")
    first = sequences[0]
    for i, s in enumerate(sequences):
        if s.shape[1:] != first.shape[1:] or s.dtype != first.dtype or s.device != first.device:
            raise ValueError(
                f"sequences[{i}]: got {s.dtype} rows {tuple(s.shape[1:])} on {s.device}, expected {first.dtype} "
                f"{tuple(first.shape[1:])} on {first.device} like sequences[0]"
            )
    values = torch.cat(list(sequences))
    return Jagged(values, offsets_from_lengths(lengths).to(values.device), bound)


def from_padded(
    padded: Tensor,
    lengths: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    max_length: int | None = None,
    total: int | None = None,
) -> Jagged:
    """Pack padded [B, L, ...].

    Args:
        padded: [B, L, ...].
        lengths: int32 or int64 [B]: the first rows of each sample count. Exactly one of lengths and mask.
        mask: boolean [B, L]: the rows that count, in any pattern; their order is kept.
        max_length: None means L.
        total: number of packed rows T, which off the host must come from the caller: with more than needed the surplus
            rows are zeros past `offsets[-1]`. None reads it on the host and means B * L elsewhere.

    Raises:
        ValueError: both or neither of lengths and mask, misfit shapes; on the host, lengths outside 0..L
            or total too small.
    """
    if padded.dim() < 2 or (lengths is None) == (mask is None):
        raise ValueError(
            f"from_padded: got padded {tuple(padded.shape)} and lengths and mask "
            f"{'both' if lengths is not None else 'neither'} given, expected [B, L, ...] and exactly one of them"
        )
    num_sequences, length = padded.shape[:2]
    if mask is None:
        assert lengths is not None
        if lengths.shape != (num_sequences,):
            raise ValueError(f"lengths: got {tuple(lengths.shape)}, expected [{num_sequences}], one per sample")
        if is_host(lengths) and lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= length:
            raise ValueError(
                f"lengths: got {int(lengths.min())}..{int(lengths.max())}, expected 0..{length}, the padded length"
            )
        mask = torch.arange(length, device=padded.device) < lengths[:, None]
        dtype = lengths.dtype
    else:
        if mask.shape != (num_sequences, length) or mask.dtype != torch.bool:
            raise ValueError(
                f"mask: got {mask.dtype} {tuple(mask.shape)}, expected bool [{num_sequences}, {length}]; compare != 0"
            )
        dtype = torch.int64
    offsets = offsets_from_lengths(mask.sum(1).to(dtype))
    flat = mask.reshape(-1)
    if total is None:
        total = int(offsets[-1]) if is_host(offsets) else flat.shape[0]
    elif is_host(offsets) and int(offsets[-1]) > total:
        raise ValueError(f"total: got {total}, but {int(offsets[-1])} rows count; raise total")
    # Rows that count go to their rank among such rows; the others to a row that is cut off. Nothing is read back.
    rank = flat.cumsum(0) - 1
    target = torch.where(flat, rank, total).clamp(max=total)
    source = torch.full((total + 1,), flat.shape[0], device=padded.device)
    source = source.scatter(0, target, torch.arange(flat.shape[0], device=padded.device))[:total]
    source = torch.where(torch.arange(total, device=padded.device) < offsets[-1], source, flat.shape[0])
    rows = padded.reshape(flat.shape[0], *padded.shape[2:])
    values = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]).index_select(0, source)
    return Jagged(values, offsets, length if max_length is None else max_length)


def to_padded(jagged: Jagged, length: int | None = None, *, value: float = 0.0) -> Tensor:
    """Padded [B, L, ...], filled with `value` after the end of each sequence.

    Args:
        length: L; None means max_length. Longer sequences lose their tail only when the caller asks for a smaller L.
    """
    size = jagged.max_length if length is None else length
    offsets = jagged.offsets.to(torch.int64)
    within = torch.arange(size, device=jagged.device)
    inside = within < offsets.diff()[:, None]
    rows = torch.where(inside, offsets[:-1, None] + within, jagged.total).reshape(-1)
    values = torch.cat([jagged.values, jagged.values.new_full((1, *jagged.values.shape[1:]), value)])
    return values.index_select(0, rows).view(jagged.num_sequences, size, *jagged.values.shape[1:])


def padding_mask(jagged: Jagged, length: int | None = None) -> Tensor:
    """Boolean [B, L]: true where `to_padded` holds a row of the sequence."""
    within = torch.arange(jagged.max_length if length is None else length, device=jagged.device)
    return within < jagged.lengths[:, None]


def from_nested(nested: Tensor, max_length: int | None = None) -> Jagged:
    """A torch.nested tensor of jagged layout [B, j, ...], zero copy.

    `max_length` may be missing when the nested tensor caches its longest length or its offsets are on the host.
    """
    if not nested.is_nested or nested.layout != torch.jagged:
        raise ValueError(
            f"nested: got layout {nested.layout}, expected torch.jagged; build it with layout=torch.jagged"
        )
    if nested.lengths() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError("nested: has holes between sequences (narrowed view), expected contiguous; call .contiguous()")
    offsets = nested.offsets()  # pyright: ignore[reportAttributeAccessIssue]
    if max_length is None:
        cached = getattr(nested, "_maybe_max_seqlen", None)
        max_length = int(cached) if cached is not None else _bound(None, offsets.diff())
    return Jagged(nested.values(), offsets, max_length)


def to_nested(jagged: Jagged) -> Tensor:
    """A torch.nested tensor of jagged layout over the same memory. Rows past `offsets[-1]` stay out of reach."""
    return torch.nested.nested_tensor_from_jagged(jagged.values, jagged.offsets, max_seqlen=jagged.max_length)


def from_torchrec(jagged_tensor: Any, max_length: int | None = None) -> Jagged:
    """A torchrec `JaggedTensor`, zero copy. For a `KeyedJaggedTensor` use `from_keyed`."""
    return Jagged(jagged_tensor.values(), jagged_tensor.offsets(), _bound(max_length, jagged_tensor.lengths()))


def from_keyed(keyed: Any, max_length: int | dict[str, int] | None = None) -> dict[str, Jagged]:
    """A torchrec `KeyedJaggedTensor`: one `Jagged` per key.

    torchrec's own `to_dict` reads the offsets per key on the host, as does this; use it before the copy to the device.
    """
    out = {}
    for key, part in keyed.to_dict().items():
        bound = max_length.get(key) if isinstance(max_length, dict) else max_length
        out[key] = Jagged(part.values(), part.offsets() - part.offsets()[0], _bound(bound, part.lengths()))
    return out


def to_torchrec(jagged: Jagged, jagged_tensor_type: type[Any]) -> Any:
    """A torchrec `JaggedTensor`: pass the class itself, `to_torchrec(j, torchrec.JaggedTensor)`."""
    return jagged_tensor_type(values=jagged.values, lengths=jagged.lengths, offsets=jagged.offsets)


def from_cu_seqlens(values: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Jagged:
    """The flash-attention convention: packed values [T, ...], int32 cu_seqlens [B + 1], longest length."""
    return Jagged(values, cu_seqlens, max_seqlen)


def to_cu_seqlens(jagged: Jagged) -> tuple[Tensor, Tensor, int]:
    """(values [T, ...], int32 cu_seqlens [B + 1], max_seqlen) as flash-attention takes them."""
    return jagged.values, jagged.offsets.to(torch.int32), jagged.max_length


__all__ = [
    "check_offsets",
    "from_cu_seqlens",
    "from_keyed",
    "from_lengths",
    "from_list",
    "from_nested",
    "from_padded",
    "from_torchrec",
    "next_power_of_two",
    "offsets_from_lengths",
    "padding_mask",
    "segment_ids",
    "to_cu_seqlens",
    "to_nested",
    "to_padded",
    "to_torchrec",
]
