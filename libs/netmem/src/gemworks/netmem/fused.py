"""Quantised saved activations inside a compiled region: the coding is part of its forward and backward graphs.

AOTAutograd inlines saved-tensor hooks that are graph modules into the graphs it compiles. The compiler then fuses the
coding into the kernel that produces a tensor and the decoding into the kernel that consumes it, where both are its own
kernels; next to a matrix product from a library it stays a kernel of its own. Only intermediates of the graph are
coded, never its inputs, outputs or parameters: somebody else holds those anyway.

Coded as FP8 rows: E4M3 in the tensor's own shape and one float32 scale per row of the last dim.
Source: pytorch/pytorch#150032 (saved-tensor hooks in AOTAutograd), torch >= 2.8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gemworks.netmem.codec import E4M3_MAX, MIN_SCALE
from torch import fx

# smaller tensors, and rows so short that the scale would cost what the codes save, stay as they are
MIN_NUMEL = 1 << 14
MIN_ROW = 16


def pack(x: torch.Tensor) -> Any:
    """`x`, or its codes, scales and dtype."""
    # float32 beside 16-bit activations is a statistic of a norm or of attention
    if x.dtype not in (torch.bfloat16, torch.float16) or x.numel() < MIN_NUMEL or x.shape[-1] < MIN_ROW:
        return x
    wide = x.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / E4M3_MAX).clamp_min(MIN_SCALE)
    codes = (wide * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scale, x.dtype


def unpack(packed: Any) -> torch.Tensor:
    """What `pack` coded."""
    if isinstance(packed, torch.Tensor):
        return packed
    codes, scale, dtype = packed
    return (codes.float() * scale).to(dtype)


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
