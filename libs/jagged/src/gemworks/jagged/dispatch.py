"""Which backend runs an op, and why: the rules, the table made from them, and `explain`.

A rule states what a backend can do. An op takes the first rule that fits; the reference backend, last, fits everything
that the op's own checks let through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from gemworks.jagged._checks import DTYPES, MAX_HEAD_DIM

Direction = Literal["forward", "backward"]
OPS = (
    "flash_attention",
    "gdpa",
    "block_attention",
    "layer_norm",
    "rms_norm",
    "seed_pool",
    "kronecker_compress",
    "sum_pool",
    "mean_pool",
    "last_pool",
    "apply_rope",
)
ATTENTION_OPS = ("flash_attention", "gdpa", "block_attention", "seed_pool")


@dataclass(frozen=True)
class Rule:
    """What one backend can do.

    Attributes:
        architectures: "any", or names such as "sm_90".
        max_head_dim: widest head for attention ops; None where it has no meaning.
        config: name of the shipped configuration table, or "-".
    """

    backend: str
    ops: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    architectures: tuple[str, ...]
    directions: tuple[Direction, ...]
    max_head_dim: int | None
    config: str = "-"

    def refusal(self, op: str, dtype: torch.dtype, architecture: str, head_dim: int | None) -> str | None:
        """Why this rule does not fit, or None if it does."""
        if op not in self.ops:
            return f"does not implement {op}"
        if dtype not in self.dtypes:
            return f"does not take {dtype}"
        if "any" not in self.architectures and architecture not in self.architectures:
            return f"runs on {', '.join(self.architectures)}, not on {architecture}"
        if head_dim is not None and op in ATTENTION_OPS and self.max_head_dim and head_dim > self.max_head_dim:
            return f"takes head widths up to {self.max_head_dim}, not {head_dim}"
        return None


RULES: tuple[Rule, ...] = (Rule("reference", OPS, DTYPES, ("any",), ("forward", "backward"), MAX_HEAD_DIM),)


@dataclass(frozen=True)
class SupportRow:
    """One line of the support table."""

    op: str
    dtype: str
    architecture: str
    direction: Direction
    backend: str
    max_head_dim: int | None


def support() -> tuple[SupportRow, ...]:
    """The op x dtype x architecture x direction table, generated from the dispatch rules.

    >>> {row.backend for row in support()}
    {'reference'}
    """
    return tuple(
        SupportRow(
            op,
            str(dtype).removeprefix("torch."),
            architecture,
            direction,
            rule.backend,
            rule.max_head_dim if op in ATTENTION_OPS else None,
        )
        for rule in RULES
        for op in rule.ops
        for dtype in rule.dtypes
        for architecture in rule.architectures
        for direction in rule.directions
    )


@dataclass(frozen=True)
class Explanation:
    """Which kernel an op would use.

    Attributes:
        backend: "reference" today.
        config: the kernel's configuration; "-" where there is nothing to choose.
        reason: in words, with the refusal of every backend that comes first.
    """

    op: str
    backend: str
    config: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.backend} ({self.reason})"


def architecture_of(device: torch.device | str) -> str:
    """ "cpu", or "sm_90" and the like for a CUDA device (asks the driver, reads no device memory)."""
    device = torch.device(device)
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def explain(
    op: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    architecture: str | None = None,
    head_dim: int | None = None,
) -> Explanation:
    """Which backend and configuration `op` would use, and why.

    Args:
        op: a name in the support table.
        dtype: of the values.
        device: where they live; asks the driver for a CUDA device's architecture.
        architecture: instead of `device`, for a machine that is not here, e.g. "sm_90".
        head_dim: H, for attention ops.

    Raises:
        ValueError: unknown op; nothing supports the request (the message says what is supported).

    >>> print(explain("gdpa", dtype=torch.float32))
    gdpa: reference (the only backend that takes float32 on cpu)
    """
    if op not in OPS:
        raise ValueError(f"op: got {op!r}, expected one of {', '.join(OPS)}")
    place = architecture_of(device) if architecture is None else architecture
    refusals = []
    for rule in RULES:
        refusal = rule.refusal(op, dtype, place, head_dim)
        if refusal is None:
            name = str(dtype).removeprefix("torch.")
            reason = f"{'; '.join(refusals)}; " if refusals else ""
            return Explanation(op, rule.backend, rule.config, f"{reason}the only backend that takes {name} on {place}")
        refusals.append(f"{rule.backend} {refusal}")
    raise ValueError(f"{op}: {'; '.join(refusals)}; support() lists every op, dtype and architecture")
