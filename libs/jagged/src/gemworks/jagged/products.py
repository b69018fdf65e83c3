"""Concatenation, splitting, and products of packed sequences with per-sample dense tensors.

Nothing here reads device memory. Letters: T packed rows, B sequences, D, E widths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gemworks.jagged._checks import check_offsets
from gemworks.jagged._packing import Side, pad_rows, segment_ids, unpad_rows
from gemworks.jagged._packing import make_plan as _make_plan
from gemworks.jagged._packing import split_groups as _split_groups
from gemworks.jagged.convert import offsets_from_lengths
from gemworks.jagged.jagged import Jagged
from gemworks.jagged.ops.pooling.reference import sum_pool
from torch import Tensor


def _check_same_batch(parts: Sequence[Jagged]) -> None:
    if not parts:
        raise ValueError("parts: got none, expected at least one Jagged; there is nothing to take the width from")
    first = parts[0]
    for i, part in enumerate(parts):
        if (
            part.num_sequences != first.num_sequences
            or part.device != first.device
            or part.values.shape[1:] != first.values.shape[1:]
            or part.values.dtype != first.values.dtype
        ):
            raise ValueError(
                f"parts[{i}]: got {part.num_sequences} sequences of {part.values.dtype} rows "
                f"{tuple(part.values.shape[1:])} on {part.device}, expected {first.num_sequences} of "
                f"{first.values.dtype} {tuple(first.values.shape[1:])} on {first.device} like parts[0]"
            )


def _targets(parts: Sequence[Jagged], offsets: Tensor) -> list[Tensor]:
    """For each part, the row of the joined values that each of its rows becomes; past its end: the joined total."""
    total = sum(p.total for p in parts)
    before = offsets[:-1].to(torch.int64)
    out = []
    for part in parts:
        own = part.offsets.to(torch.int64)
        sequence = segment_ids(own, part.total)
        inside = sequence < part.num_sequences
        shift = torch.cat([before - own[:-1], before.new_zeros(1)])[sequence]
        row = torch.arange(part.total, device=part.device)
        out.append(torch.where(inside, row + shift, total))
        before = before + own.diff()
    return out


def concat(parts: Sequence[Jagged]) -> Jagged:
    """Join the sequences of each sample, in the order of `parts`: sample b of the result is theirs in turn.

    Args:
        parts: B sequences each, with rows of one shape, dtype and device.

    Returns:
        Jagged of T = sum of the parts' T; rows past a part's end become zero rows past the result's end.

    Raises:
        ValueError: no parts, or parts that differ.

    >>> a = Jagged.from_lengths(torch.tensor([1.0, 2.0]), torch.tensor([1, 1]))
    >>> b = Jagged.from_lengths(torch.tensor([3.0, 4.0]), torch.tensor([2, 0]))
    >>> [s.tolist() for s in concat([a, b]).unbind()]
    [[1.0, 3.0, 4.0], [2.0]]
    """
    _check_same_batch(parts)
    first = parts[0]
    offsets = first.offsets
    for part in parts[1:]:
        offsets = offsets + part.offsets
    offsets = offsets.to(first.offsets.dtype)
    total = sum(p.total for p in parts)
    target = torch.cat(_targets(parts, offsets))
    source = torch.full((total + 1,), total, device=first.device)
    source = source.scatter(0, target, torch.arange(total, device=first.device))[:total]
    source = torch.where(torch.arange(total, device=first.device) < offsets[-1], source, total)
    rows = torch.cat([*(p.values for p in parts), first.values.new_zeros(1, *first.values.shape[1:])])
    return Jagged(rows.index_select(0, source), offsets, sum(p.max_length for p in parts))


def split(joined: Jagged, like: Sequence[Jagged]) -> list[Jagged]:
    """Undo `concat`: cut each sequence of `joined` into pieces as long as those of `like`.

    Args:
        joined: B sequences, rows of any shape.
        like: the parts given to `concat` (their values are not read, only their offsets and T).

    Returns:
        One Jagged per part, with that part's offsets; rows past a part's end are zero.

    Raises:
        ValueError: the parts' rows do not add up to the rows of `joined`.
    """
    if not like or any(p.num_sequences != joined.num_sequences for p in like):
        raise ValueError(
            f"like: got parts of {[p.num_sequences for p in like]} sequences, expected {joined.num_sequences} in each; "
            f"pass the parts that were joined"
        )
    if sum(p.total for p in like) != joined.total:
        raise ValueError(
            f"like: got parts of {[p.total for p in like]} rows, expected a sum of {joined.total}; "
            f"pass the parts that were joined"
        )
    rows = torch.cat([joined.values, joined.values.new_zeros(1, *joined.values.shape[1:])])
    targets = _targets(like, joined.offsets)
    return [
        Jagged(rows.index_select(0, target), part.offsets, part.max_length)
        for part, target in zip(like, targets, strict=True)
    ]


def concat_batch(parts: Sequence[Jagged]) -> Jagged:
    """Put batches behind one another: the sequences of parts[0], then those of parts[1], ...

    Raises ValueError when a part has rows past its end (host) or rows differ. On a device such rows can't be seen, and
    must not exist.

    >>> a = Jagged.from_lengths(torch.tensor([1.0, 2.0]), torch.tensor([2]))
    >>> concat_batch([a, a]).offsets.tolist()
    [0, 2, 4]
    """
    if not parts:
        raise ValueError("parts: got none, expected at least one Jagged; there is nothing to take the width from")
    for i, part in enumerate(parts):
        if part.offsets.device.type == "cpu" and int(part.offsets[-1]) != part.total:
            raise ValueError(
                f"parts[{i}]: {part.total - int(part.offsets[-1])} rows past the last offset, "
                f"expected none; cut them off"
            )
    lengths = torch.cat([p.lengths for p in parts])
    return Jagged(torch.cat([p.values for p in parts]), offsets_from_lengths(lengths), max(p.max_length for p in parts))


def expand_rows(dense: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Repeat each sample's row for every row of its sequence: [B, ...] to [T, ...]; 0 past `offsets[-1]`.

    >>> expand_rows(torch.tensor([5.0, 6.0]), torch.tensor([0, 2, 3]), 3).tolist()
    [5.0, 5.0, 6.0]
    """
    check_offsets("offsets", offsets, total=total, max_length=None, device=dense.device)
    if dense.dim() == 0 or dense.shape[0] != offsets.shape[0] - 1:
        raise ValueError(f"dense: got {tuple(dense.shape)}, expected [{offsets.shape[0] - 1}, ...], one row per sample")
    rows = torch.cat([dense, dense.new_zeros(1, *dense.shape[1:])])
    return rows.index_select(0, segment_ids(offsets, total))


def jagged_dense_matmul(x: Tensor, dense: Tensor, offsets: Tensor, *, max_length: int) -> Tensor:
    """Rows times their sample's matrix: `y_t = x_t W_b`, [T, D] x [B, D, E] to [T, E]; 0 past `offsets[-1]`.

    Raises:
        ValueError: shapes that do not fit, bad offsets.

    >>> x, w = torch.randn(5, 3), torch.randn(2, 3, 4)
    >>> y = jagged_dense_matmul(x, w, torch.tensor([0, 1, 5]), max_length=4)
    >>> torch.allclose(y[1:], x[1:] @ w[1], atol=1e-6)
    True
    """
    num_sequences = offsets.shape[0] - 1
    if x.dim() != 2 or dense.dim() != 3 or dense.shape[:2] != (num_sequences, x.shape[1]) or dense.dtype != x.dtype:
        raise ValueError(
            f"dense: got {dense.dtype} {tuple(dense.shape)} with x {x.dtype} {tuple(x.shape)}, expected "
            f"{x.dtype} [{num_sequences}, {x.shape[-1]}, E]; one matrix per sample"
        )
    check_offsets("offsets", offsets, total=x.shape[0], max_length=max_length, device=x.device)
    side = Side(x.shape[0], offsets=offsets, max_length=max_length)
    plan = _make_plan(side, side, num_sequences, 1, 1, x.device)
    parts = _split_groups(pad_rows(x[:, None], plan.layout_q), plan.groups, 1, "q")
    outs = [
        torch.matmul(part[:, 0], dense.index_select(0, group.sequences_b)).reshape(-1, dense.shape[2])
        for part, group in zip(parts, plan.groups, strict=True)
    ]
    padded = torch.cat(outs) if outs else x.new_zeros(0, dense.shape[2]) + 0 * (x.sum() + dense.sum())
    return unpad_rows(padded, plan.layout_q, 1)[:, 0]


def jagged_jagged_matmul(x: Tensor, y: Tensor, offsets: Tensor, *, max_length: int) -> Tensor:
    """`X_b^T Y_b` for each sequence: [T, D] and [T, E] to [B, D, E]; 0 for an empty sequence.

    >>> x, y = torch.randn(5, 3), torch.randn(5, 2)
    >>> out = jagged_jagged_matmul(x, y, torch.tensor([0, 5, 5]), max_length=8)
    >>> torch.allclose(out[0], x.T @ y, atol=1e-6), float(out[1].abs().sum())
    (True, 0.0)
    """
    if x.dim() != 2 or y.dim() != 2 or x.shape[0] != y.shape[0] or x.dtype != y.dtype:
        raise ValueError(
            f"y: got {y.dtype} {tuple(y.shape)} with x {x.dtype} {tuple(x.shape)}, expected the same rows and dtype"
        )
    check_offsets("offsets", offsets, total=x.shape[0], max_length=max_length, device=x.device)
    num_sequences = offsets.shape[0] - 1
    side = Side(x.shape[0], offsets=offsets, max_length=max_length)
    plan = _make_plan(side, side, num_sequences, 1, 1, x.device)
    x_parts = _split_groups(pad_rows(x[:, None], plan.layout_q), plan.groups, 1, "q")
    y_parts = _split_groups(pad_rows(y[:, None], plan.layout_q), plan.groups, 1, "q")
    out = x.new_zeros(num_sequences, x.shape[1], y.shape[1]) + 0 * (x[:0].sum() + y[:0].sum())
    for a, b, group in zip(x_parts, y_parts, plan.groups, strict=True):
        out = out.index_copy(0, group.sequences_b, torch.matmul(a[:, 0].mT, b[:, 0]))
    return out


def jagged_dot(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Sum over a sequence's rows and columns of x * y: [T, ...] and [T, ...] to [B].

    >>> jagged_dot(torch.ones(3, 2), torch.ones(3, 2), torch.tensor([0, 1, 3])).tolist()
    [2.0, 4.0]
    """
    if x.shape != y.shape:
        raise ValueError(f"y: got {tuple(y.shape)}, expected x's {tuple(x.shape)}; the product is element by element")
    return sum_pool((x * y).reshape(x.shape[0], -1).sum(1), offsets)
