"""The alternative to BBS: move samples between ranks, with one all-to-all per batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from gemworks.parallel.shuffler import deal
from torch import Tensor


def global_assignment(costs: Tensor) -> Tensor:
    """Which rank each sample goes to: equal counts, about equal cost.

    Args:
        costs: float [num_ranks, num_samples].

    Returns:
        int64 [num_ranks, num_samples]: target ranks; each appears `num_samples` times.
    """
    if costs.ndim != 2:
        raise ValueError(f"costs: got shape {tuple(costs.shape)}, expected [num_ranks, num_samples]")
    return deal(costs.reshape(-1), costs.shape[0]).reshape(costs.shape)


def exchange_samples(
    values: Sequence[Tensor], lengths_B: Tensor, costs_B: Tensor, group: dist.ProcessGroup | None = None
) -> tuple[list[Tensor], Tensor]:
    """Move whole samples so that ranks' costs balance; every rank of the group calls it with the same number of
    samples.

    Costs two collectives of sizes (an all-gather of costs, an all-to-all of lengths) and one all-to-all per value
    tensor, and reads split sizes on the host. Samples of length 0 and ranks without any token are fine.

    Args:
        values: packed tensors [T, ...] with T = sum of lengths, all sharing `lengths_B`.
        lengths_B: int64 [B].
        costs_B: float [B].
        group: the world's if None.

    Returns:
        The values and lengths that this rank now has, ordered by source rank and then by place there.

    Raises:
        ValueError: lengths, costs and values do not fit together, on this rank or another. Every rank raises once costs
            are known, before samples are sent. Values of lengths are looked at on the CPU only.
    """
    wrong = _wrong_samples(values, lengths_B, costs_B)
    world = dist.get_world_size(group)
    B = lengths_B.numel()
    costs_RB = torch.empty(world, B, dtype=torch.float64, device=lengths_B.device)
    # a rank alone with its error would leave the others waiting: it says so by costs that are none
    sent_B = costs_B.double().contiguous() if not wrong else torch.full_like(costs_RB[0], torch.nan)
    dist.all_gather_into_tensor(costs_RB.view(-1), sent_B, group=group)
    costs_RB = costs_RB.cpu()
    me = dist.get_rank(group)
    bad = [r for r in range(world) if not bool(torch.isfinite(costs_RB[r]).all())]
    if wrong or me in bad:
        raise ValueError(wrong or "costs_B: got a value that is not finite, expected the cost of each sample")
    if bad:
        raise ValueError(f"costs_B: got none from ranks {bad}, expected all to call with samples that fit; see theirs")
    target_RB = global_assignment(costs_RB)
    order_B = torch.argsort(target_RB[me], stable=True)
    sent = torch.bincount(target_RB[me], minlength=world).tolist()
    received = (target_RB == me).sum(dim=1).tolist()
    order_B = order_B.to(lengths_B.device)
    out_B = lengths_B[order_B]
    new_B = torch.empty(sum(received), dtype=lengths_B.dtype, device=lengths_B.device)
    dist.all_to_all_single(new_B, out_B, received, sent, group=group)
    tokens_out = [int(x.sum()) for x in out_B.cpu().split(sent)]
    tokens_in = [int(x.sum()) for x in new_B.cpu().split(received)]
    starts_B = (lengths_B.cumsum(0) - lengths_B)[order_B]
    first = torch.repeat_interleave(starts_B - (out_B.cumsum(0) - out_B), out_B)
    rows_T = first + torch.arange(first.numel(), device=first.device)
    moved: list[Tensor] = []
    for v in values:
        packed = v[rows_T].contiguous()
        fresh = torch.empty(sum(tokens_in), *v.shape[1:], dtype=v.dtype, device=v.device)
        dist.all_to_all_single(fresh, packed, tokens_in, tokens_out, group=group)
        moved.append(fresh)
    return moved, new_B


def _wrong_samples(values: Sequence[Tensor], lengths_B: Tensor, costs_B: Tensor) -> str:
    """What is wrong with them, or ""; the host does not wait for a device to find out."""
    if lengths_B.ndim != 1 or lengths_B.is_floating_point():
        return f"lengths_B: got {lengths_B.dtype} {tuple(lengths_B.shape)}, expected integers [B]"
    if costs_B.shape != lengths_B.shape:
        return f"costs_B: got shape {tuple(costs_B.shape)}, expected {tuple(lengths_B.shape)} as lengths_B"
    if lengths_B.is_cuda:
        return ""
    if bool((lengths_B < 0).any()):
        return f"lengths_B: got {int(lengths_B.min())}, expected >= 0"
    total = int(lengths_B.sum())
    for v in values:
        if v.shape[:1] != (total,):
            return f"values: got shape {tuple(v.shape)}, expected {total} rows, the sum of lengths_B"
    return ""
