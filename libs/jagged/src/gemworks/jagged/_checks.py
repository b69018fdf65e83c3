"""Checks of arguments that every op shares. Each message names the argument, what came, what was expected and the fix.

Nothing here reads device memory, except in debug mode: values of offsets are checked when they live on the host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OFFSET_DTYPES = (torch.int32, torch.int64)
MAX_HEAD_DIM = 256
_debug = os.environ.get("GEMWORKS_JAGGED_DEBUG", "0") not in ("", "0")


@contextmanager
def debug_checks(on: bool = True) -> Iterator[None]:
    """Within it, offsets on a device are read back and checked like those on the host: every op then waits for it.

    GEMWORKS_JAGGED_DEBUG=1 in the environment does the same for a whole process. Compiled code is not checked.

    >>> from gemworks.jagged import debug_checks
    >>> with debug_checks():
    ...     pass  # a step that reads rows it should not
    """
    global _debug
    before, _debug = _debug, on
    try:
        yield
    finally:
        _debug = before


def _is_readable(x: Tensor) -> bool:
    """Whether debug mode may read `x`: not a fake, a meta or a traced tensor."""
    if torch.compiler.is_compiling() or not _debug:
        return False
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta"


def is_host(x: Tensor) -> bool:
    """Whether the values of `x` can be read for free: a plain CPU tensor, not a fake one or a traced one."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)


def check_float(name: str, x: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: got {type(x).__name__}, expected a Tensor")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name}: got dtype {x.dtype}, expected one of {DTYPES}; cast it with .to(torch.bfloat16)")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name}: got dtype {x.dtype}, expected {dtype} like q; cast it with .to({dtype})")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: got device {x.device}, expected {device} like q; move it with .to('{device}')")


def check_scale(scale: float | None) -> None:
    """A tensor would have to be read from its device in every step."""
    if isinstance(scale, (Tensor, str)):
        got = f"a Tensor on {scale.device}" if isinstance(scale, Tensor) else repr(scale)
        raise ValueError(f"scale: got {got}, expected a number known on the host; pass float(scale), made once")


def check_head_dim(name: str, head_dim: int) -> None:
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"{name}: got head width {head_dim}, expected 1..{MAX_HEAD_DIM}; "
            f"split the model width over more heads (support() lists what each backend takes)"
        )


def check_max_length(name: str, max_length: int | None) -> int:
    if max_length is None:
        raise ValueError(f"{name}: missing; pass a host integer that no sequence exceeds (Jagged.max_length is one)")
    if isinstance(max_length, bool) or not isinstance(max_length, int):
        raise ValueError(
            f"{name}: got {type(max_length).__name__}, expected int; pass a bound known on the host, not a tensor"
        )
    if max_length < 0:
        raise ValueError(f"{name}: got {max_length}, expected >= 0; pass a bound of the sequence lengths")
    return max_length


@lru_cache(maxsize=1024)
def _check_offset_values(name: str, values: tuple[int, ...], total: int, max_length: int | None) -> None:
    offsets = torch.tensor(values, dtype=torch.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise ValueError(f"{name}: starts at {first}, expected 0; slice the values too, or subtract {name}[0]")
    lengths = offsets.diff()
    if lengths.numel() and int(lengths.min()) < 0:
        at = int(lengths.argmin())
        raise ValueError(
            f"{name}: not monotone, {name}[{at + 1}] = {int(offsets[at + 1])} < {name}[{at}] = {int(offsets[at])}; "
            f"offsets are the running sum of the lengths, starting with 0"
        )
    if last > total:
        raise ValueError(
            f"{name}: ends at {last}, but there are only {total} rows; offsets and values belong to different batches"
        )
    if lengths.numel() and max_length is not None and int(lengths.max()) > max_length:
        longest = int(lengths.max())
        raise ValueError(
            f"max_length of {name}: got {max_length}, but sequence {int(lengths.argmax())} has {longest} rows; "
            f"raise max_length to at least {longest} or truncate the sequence"
        )


def check_offsets(
    name: str, offsets: Tensor, *, total: int, max_length: int | None, device: torch.device | None = None
) -> None:
    """Raise ValueError unless `offsets` [B + 1] is a valid row partition of `total` rows.

    Values (start, order, end, longest sequence) are checked when the offsets are on the host; on a device only dtype,
    shape and placement are, because reading them would stall the stream (`debug_checks` reads them nevertheless).
    """
    if not isinstance(offsets, Tensor):
        raise ValueError(f"{name}: got {type(offsets).__name__}, expected a Tensor [B + 1]; use Jagged.from_lengths")
    if offsets.dtype not in OFFSET_DTYPES:
        raise ValueError(f"{name}: got dtype {offsets.dtype}, expected int32 or int64; cast it with .to(torch.int64)")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(
            f"{name}: got shape {tuple(offsets.shape)}, expected [B + 1] with B >= 0; an empty batch has offsets [0]"
        )
    if device is not None and offsets.device != device:
        raise ValueError(f"{name}: got device {offsets.device}, expected {device}; move it with .to('{device}')")
    if is_host(offsets) or _is_readable(offsets):
        _check_offset_values(name, tuple(offsets.tolist()), total, max_length)
