"""Tensors that are made once for each device and never written: tables, and zeros that stand where nothing is counted.

Where a tensor would not serve every later call, it is made anew and forgotten: a compiler's or a fake mode's is no
tensor of memory, and one made while a CUDA graph is captured lies in that graph's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

_made: dict[tuple[Hashable, torch.device], Tensor] = {}


def made_once(name: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """What `make` makes on `device`, the same each time.

    Args:
        name: of what is made.
        device: with its index, as tensors have it.
        make: called the first time, and wherever what it makes cannot be kept.
    """
    found, traced = _made.get((name, device)), torch.compiler.is_dynamo_compiling()
    # A mode wants a tensor of its own kind, and may refuse any other.
    if found is not None and (traced or not torch._C._len_torch_dispatch_stack()):
        return found
    if traced:
        return make()
    # A tensor of inference mode could not be saved for a backward later.
    with torch.inference_mode(False):
        made = make()
    if (
        type(made) is not Tensor
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return made
    if device.type == "cuda":
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return made
            # It will be read on other streams, which do not wait for this one. By an event: this once is no wait of the
            # caller's, as which torch's mode that looks for waits would report a stream's.
            written = torch.cuda.Event()
            written.record()
            written.synchronize()
    return _made.setdefault((name, device), made)


def kept_zeros(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Zeros, made once: `made_once`."""
    return made_once((dtype, shape), device, lambda: torch.zeros(shape, dtype=dtype, device=device))
