"""Quantised saved activations inside a compiled region: the coding is part of its forward and backward graphs.

AOTAutograd inlines saved-tensor hooks that are graph modules into the graphs it compiles. The compiler then fuses the
coding into the kernel that produces a tensor and the decoding into the kernel that consumes it, where both are its own
kernels; next to a matrix product from a library it stays a kernel of its own. Only intermediates of the graph are
coded, never its inputs, outputs or parameters: somebody else holds those anyway.

Coded as E5M2 without a scale: the range of float16, two bits of mantissa, 25 dB per tensor. A scale would need the
largest magnitude of a row before the first code is written, which keeps the compiler from fusing the coding into an
elementwise producer: coding by rows (E4M3) cost 36 % of a PFFN region's time on an H200.
Source: pytorch/pytorch#150032 (saved-tensor hooks in AOTAutograd), torch >= 2.8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

# smaller tensors stay as they are
MIN_NUMEL = 1 << 14
E5M2_MAX = 57344.0


def pack(x: torch.Tensor) -> Any:
    """`x`, or its codes and dtype. Magnitudes above 57344 saturate, below 2^-17 they become zero."""
    # float32 beside 16-bit activations is a statistic of a norm or of attention
    if x.dtype not in (torch.bfloat16, torch.float16) or x.numel() < MIN_NUMEL:
        return x
    return x.clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2), x.dtype


def unpack(packed: Any) -> torch.Tensor:
    """What `pack` coded."""
    if isinstance(packed, torch.Tensor):
        return packed
    codes, dtype = packed
    return codes.to(dtype)


def _graph_of(function: Callable[..., Any]) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    return fx.GraphModule({}, graph)


@contextlib.contextmanager
def quantise_in_graph() -> Iterator[None]:
    """Graphs that are compiled while this is open keep what they save for backward in coded form."""
    from torch._functorch import config

    # the cache's key doesn't know these hooks
    with (
        config.patch(enable_autograd_cache=False, saved_tensors_hooks_filtering_mode="donated"),  # type: ignore[attr-defined]
        torch.autograd.graph.saved_tensors_hooks(_graph_of(pack), _graph_of(unpack)),
    ):
        yield
