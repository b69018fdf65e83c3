# Kernel launches `kernel[grid](...)` are not typed as calls of their own signature.
# pyright: reportCallIssue=false
"""Starting a Triton kernel again without the look-up that Triton does each time.

`kernel[grid](...)` binds names, specialises every argument and hashes the result, tens of microseconds a launch; a
linear layer launches about ten. The compiled kernel is remembered by what that key depends on, computed directly, and
started without the hooks that profilers of Triton may set.

Triton starts kernels on whichever device is current. These start on the device of their first tensor, on that device's
current stream; every launch of this package goes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


@dataclass(frozen=True, eq=False)
class Setup:
    """What a kernel is compiled and started with, but for tensors and sizes. Hashed by identity: make each once.

    Attributes:
        constants: the kernel's constants by name.
        options: `num_warps` and `maxnreg`.
        words: what the kernel takes the first tensors as, where that is not their dtype.
    """

    constants: Mapping[str, Any]
    options: Mapping[str, int]
    words: tuple[torch.dtype | None, ...] = ()


# Calls Triton's launcher: `start(x, y, z, stream, *head, *pointers, *numbers, *tail)`.
Started = tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]


class Launcher:
    """A `triton.jit` function with what it was compiled to; its tensors come first, its constants last.

    Compiled kernels are kept here and not in a table of all kernels: a function that is gone takes them with it.
    """

    __slots__ = ("compiled", "kernel", "num_tensors")

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple[int, Any], Started] = {}
        self.num_tensors: int | None = None

    def again(
        self, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], key: Any
    ) -> bool:
        """`kernel[grid](*tensors, *numbers, ...)` if that was looked up before, or False: then `look_up` it.

        Args:
            grid: programs.
            tensors: of one device.
            numbers: integers below 2^63 and floats.
            key: equal for launches of this kernel that compile to the same code.
        """
        index = tensors[0].get_device()
        found = self.compiled.get((index, key))
        if found is None:
            return False
        if index != torch._C._cuda_getDevice():  # a fifth of what entering a guard at every launch takes
            with torch.cuda.device(index):
                return self.again(grid, tensors, numbers, key)
        start, head, tail = found
        stream = torch._C._cuda_getCurrentRawStream(index)
        start(*grid, stream, *head, *[tensor.data_ptr() for tensor in tensors], *numbers, *tail)
        return True

    def look_up(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        setup: Setup,
        key: Any,
    ) -> None:
        """Start the kernel in Triton's own way, which compiles it where it must, and remember it under `key`."""
        words = (*setup.words, *(None,) * len(tensors))
        typed = [t if word is None else _viewed(t, word) for t, word in zip(tensors, words, strict=False)]
        device = tensors[0].device
        if device.type != "cuda":  # the interpreter
            self.kernel[grid](*typed, *numbers, **setup.constants, **setup.options)
            return
        with torch.cuda.device(device):
            compiled = self.kernel[grid](*typed, *numbers, **setup.constants, **setup.options)
        names = self.kernel.arg_names[len(tensors) + len(numbers) :]
        if hasattr(compiled, "packed_metadata") and set(names) == set(setup.constants):
            start, head = _entry(compiled)
            self.compiled[tensors[0].get_device(), key] = start, head, tuple(setup.constants[name] for name in names)


_launchers: dict[int, Launcher] = {}


def launcher_of(kernel: Any) -> Launcher:
    """The one launcher of a kernel."""
    # Triton hashes a function by its source, behind a lock. The launcher keeps its kernel, so the number stays its own.
    found = _launchers.get(id(kernel))
    return found if found is not None else _launchers.setdefault(id(kernel), Launcher(kernel))


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    options: Mapping[str, int],
    key: tuple[Any, ...] | None = None,
    words: tuple[torch.dtype | None, ...] = (),
) -> None:
    """`kernel[grid](*arguments, **constants, **options)`, for whoever keeps no `Setup`.

    Args:
        kernel: a `triton.jit` function whose constants come after its other arguments.
        arguments: tensors of one device, then integers below 2^63 and floats, by position.
        constants: the remaining arguments, by name.
        options: `num_warps` and `maxnreg`.
        key: equal for launches of this kernel that compile to the same code, where the caller knows that more cheaply
            than by asking each argument.
        words: as in `Setup`.
    """
    launcher = launcher_of(kernel)
    num_tensors = launcher.num_tensors
    if num_tensors is None:
        num_tensors = launcher.num_tensors = sum(isinstance(a, Tensor) for a in arguments)
        assert all(isinstance(a, Tensor) for a in arguments[:num_tensors]), "tensors come first"
    if key is None:
        key = (*map(specialisation, arguments), *constants.values(), *options.items())
    tensors, numbers = arguments[:num_tensors], arguments[num_tensors:]
    if not launcher.again(grid, tensors, numbers, key):
        launcher.look_up(grid, tensors, numbers, Setup(constants, options, words), key)


def _viewed(tensor: Tensor, word: torch.dtype) -> Tensor:
    """A matrix as words along whichever dim is contiguous: kernels ask for its address alone."""
    return (tensor if tensor.stride(-1) == 1 else tensor.t()).view(word)


def _entry(compiled: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What starts a compiled kernel, and what it takes between the stream and the kernel's arguments.

    Pointers go as integers, which saves the launcher its questions to each tensor. Triton 3.6's launcher asks for
    scratch memory, which our kernels have none of, and hands its arguments on: where a call of it that starts nothing
    shows that they go on in their order, the function that it hands them to is started instead.
    """
    run, head = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    scratch = (getattr(run, name, None) for name in ("global_scratch_size", "profile_scratch_size"))
    if type(run).__name__ != "CudaLauncher" or any(size != 0 for size in scratch):
        return run, head
    handed_on: list[tuple[Any, ...]] = []
    twin = object.__new__(type(run))
    twin.__dict__.update(run.__dict__, launch=lambda *arguments: handed_on.append(arguments))
    first, last = (object(), object(), object(), object()), (object(), object())
    twin(*first, *head, *last)
    (arguments,) = handed_on
    if arguments[:4] == first and arguments[-2:] == last:
        return run.launch, arguments[4:-2]
    return run, head
