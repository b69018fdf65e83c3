"""Refusing to write what is broken: no checkpoint from a step whose gradients, weights or loss are not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class NonFiniteError(RuntimeError):
    """Something that must be finite is not; the message names it."""


def non_finite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity (None entries are skipped); one host sync for all of them."""
    present = [(name, tensor.detach()) for name, tensor in named if tensor is not None and tensor.is_floating_point()]
    if not present:
        return []
    flags = torch.stack([tensor.isfinite().all() for _, tensor in present])
    return [name for (name, _), fine in zip(present, flags.tolist(), strict=True) if not fine]


def check_before_checkpoint(model: nn.Module, loss: Tensor | None = None) -> None:
    """Call before writing a checkpoint: raises if the loss, a gradient or a parameter is not finite.

    A NaN block quantises to NaN (scale byte 0xFF), so a broken operand always arrives here.

    Raises:
        NonFiniteError: names up to eight of the tensors at fault.
    """
    named: list[tuple[str, Tensor | None]] = [("loss", loss)]
    for name, parameter in model.named_parameters():
        named += [(f"{name}.grad", parameter.grad), (name, parameter)]
    bad = non_finite(named)
    if bad:
        shown = ", ".join(bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
        raise NonFiniteError(f"not finite: {shown}; no checkpoint is written from this step, resume from the last one")
