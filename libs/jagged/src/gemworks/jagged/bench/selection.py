"""What the command's options choose: cases of attention, and ops that memory bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gemworks.jagged.bench import bandwidth, blocks, norms
from gemworks.jagged.bench.cases import CASES, SMOKE, Case, grouped

SUITES = ("attention", "blocks", "norms")


def label_of(cases: list[Case]) -> str:
    first = cases[0]
    return f"{' + '.join(c.op for c in cases)} {first.shape} {first.law} H{first.head_dim}"


def attention_groups(args: Any) -> list[list[Case]]:
    """Cases that share their inputs together, the most urgent first."""
    if "attention" not in args.suite:
        return []
    chosen = grouped(
        c
        for c in (SMOKE if args.smoke else CASES)
        if c.priority <= args.priority and args.only in f"{c.op} {c.shape} {c.law} H{c.head_dim}"
    )
    return [cases for cases in chosen if cases[0].priority >= args.from_priority]


def memory_bound_subjects(
    args: Any, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], bandwidth.Subject]]]:
    """(label, how to make it) of block attention and norms."""
    made: list[Iterator[tuple[str, Callable[[], bandwidth.Subject]]]] = []
    if "blocks" in args.suite and args.smoke:
        made.append(blocks.subjects(device, dtype, blocks.Shape(5, 150, 2, 16), ("norm rope qkv",)))
    elif "blocks" in args.suite:
        made.append(blocks.subjects(device, dtype))
        made.append(blocks.subjects(device, dtype, blocks.LONGEST, ("rope",)))
        others = ("plain", "rope fp16 tables")
        made += [blocks.subjects(device, dtype, blocks.Shape(block=block), others) for block in (32, 128)]
    if "norms" in args.suite:
        tiny: Any = [(("layer_norm affine residual", 16),), 64] if args.smoke else []
        made.append(norms.subjects(device, dtype, *tiny))
    for subjects in made:
        for label, make in subjects:
            if args.only in label:
                yield label, make


def is_late(label: str) -> bool:
    """Measured last, where time may run out."""
    return label.rsplit(" ", 1)[0] in norms.LATE or label.endswith(blocks.LATE)
