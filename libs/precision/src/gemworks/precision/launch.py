# Kernel launches `kernel[grid](...)` are not typed as calls of their own signature.
# pyright: reportCallIssue=false
"""Starting a Triton kernel again without the look-up that Triton does each time.

`kernel[grid](...)` binds names, specialises every argument and hashes the result, tens of microseconds a launch; a
linear layer launches about ten. The compiled kernel is remembered by what that key depends on, computed directly, and
started without the hooks that profilers of Triton may set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], tuple[Any, int, tuple[Any, ...]]] = {}


def integers(*values: int) -> tuple[Any, ...]:
    """What Triton compiles differently for, of integers: 1, multiples of 16, 64-bit size.

    >>> integers(32, 1) == integers(64, 1), integers(1) == integers(3), integers(32) == integers(2**40)
    (True, False, False)
    """
    return tuple([v == 1 or (v % 16 == 0, v < 2**31) for v in values])


def specialisation(argument: Any) -> Any:
    """What Triton compiles differently for: dtype and 16-byte alignment of tensors; 1, multiples of 16 and 64-bit size
    of integers.

    >>> specialisation(32) == specialisation(64), specialisation(1) == specialisation(3), specialisation(2**40 + 1)
    (True, False, (False, False, True))
    """
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, not -(2**31) <= argument < 2**31
    return type(argument)


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    options: Mapping[str, int],
    key: tuple[Any, ...] | None = None,
    words: tuple[torch.dtype | None, ...] = (),
) -> None:
    """`kernel[grid](*arguments, **constants, **options)`.

    Args:
        kernel: a `triton.jit` function whose constants come after its other arguments.
        arguments: tensors of one device, then integers below 2^63 and floats, by position.
        constants: the remaining arguments, by name.
        options: `num_warps` and `maxnreg`.
        key: equal for launches of this kernel that compile to the same code, where the caller knows that more cheaply
            than by asking each argument.
        words: what the kernel takes the first tensors as, where that is not their dtype.
    """
    device = arguments[0].device
    if device.type == "cuda":
        if key is None:
            key = (*map(specialisation, arguments), *constants.values(), *options.items())
        index = device.index
        key = (id(kernel), index, key)  # kernels live as long as their modules
        found = _compiled.get(key)
        if found is not None and torch._C._cuda_getDevice() == index:
            start, num_tensors, values = found
            pointers = [tensor.data_ptr() for tensor in arguments[:num_tensors]]
            start(*grid, torch._C._cuda_getCurrentRawStream(index), *pointers, *arguments[num_tensors:], *values)
            return
    typed = [a if word is None else _viewed(a, word) for a, word in zip(arguments, words, strict=False)]
    arguments = (*typed, *arguments[len(typed) :])
    if device.type != "cuda":  # the interpreter
        kernel[grid](*arguments, **constants, **options)
        return
    with torch.cuda.device(device):
        compiled = kernel[grid](*arguments, **constants, **options)
    names = kernel.arg_names[len(arguments) :]
    if key is not None and hasattr(compiled, "packed_metadata") and set(names) == set(constants):
        num_tensors = sum(isinstance(a, Tensor) for a in arguments)
        assert all(isinstance(a, Tensor) for a in arguments[:num_tensors]), "tensors come first"
        _compiled[key] = _starter(compiled), num_tensors, tuple(constants[name] for name in names)


def _viewed(tensor: Tensor, word: torch.dtype) -> Tensor:
    """A matrix as words along whichever dim is contiguous: kernels ask for its address alone."""
    return (tensor if tensor.stride(-1) == 1 else tensor.t()).view(word)


def _starter(compiled: Any) -> Any:
    """Starts a compiled kernel with pointers as integers, which saves the launcher its questions to each tensor."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *arguments)

    return start
