"""`custom_op`: an opaque operator as `torch.library.custom_op` makes it, with a shorter way through autograd.

torch's own flattens every argument of an operator that takes a list of tensors, forward and backward, to find gradients
inside of lists. Our lists are tile schedules and never have any: a list's gradients are dropped unseen.

A call on plain tensors that nobody watches doesn't pass torch's dispatcher either, which converts every argument to C++
and back, twice for an operator with a derivative. Compilers, modes, transforms, tensor subclasses and profilers get the
dispatcher's call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import _C

NAMESPACE = "gemworks_jagged"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_DEVICES = {"cpu": "CPU", "cuda": "CUDA"}
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
Function = Callable[..., Any]


class CustomOp:
    """An operator of this package, called like its function; made by `custom_op`.

    Args:
        name: without the namespace.
        schema: of torch.library, without defaults: `(Tensor x, int n) -> Tensor`. Mutates nothing.
    """

    def __init__(self, name: str, schema: str) -> None:
        self.name = f"{NAMESPACE}::{name}"
        self._differentiate: Function | None = None
        self._save: Function | None = None
        self._kernels: dict[str, Function] = {}
        self._function = self._make_function()
        torch.library.define(self.name, schema, lib=_library, tags=torch.Tag.pt2_compliant_tag)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        arguments = self.overload._schema.arguments
        assert all(not a.has_default_value() and not a.kwarg_only for a in arguments)
        self._tensors = tuple(i for i, a in enumerate(arguments) if str(a.type) in ("Tensor", "Optional[Tensor]"))
        _library.impl(name, self._dispatch, "Autograd", with_keyset=True)

    def __call__(self, *args: Any) -> Any:
        kernel = None if torch.compiler.is_compiling() else self._kernel_for(args)
        if kernel is None:
            return self.overload(*args)
        if _C.is_grad_enabled() and _C._any_requires_grad(*args):  # pyright: ignore[reportAttributeAccessIssue]
            return self._function.apply(kernel, *args)
        return _below_autograd(kernel, args)

    def register_kernel(self, device: str | None, function: Function | None = None) -> Any:
        """The implementation on a type of device, None for all; also a decorator."""
        if function is None:
            return lambda f: self.register_kernel(device, f)
        key = "CompositeExplicitAutograd" if device is None else _DEVICES[device]
        opaque = _opaque(function)
        _library.impl(self.name.split("::")[1], opaque, key)
        self._kernels.update(dict.fromkeys(_DEVICES if device is None else [device], opaque))
        return function

    def register_fake(self, function: Function) -> Function:
        """Shapes and dtypes of the outputs, for the compiler."""
        torch.library.register_fake(self.name, function, lib=_library)
        return function

    def register_autograd(self, backward: Function, *, setup_context: Function) -> None:
        """The backward formula; both arguments as for `torch.library.register_autograd`."""
        self._differentiate, self._save = backward, setup_context

    def _kernel_for(self, args: tuple[Any, ...]) -> Function | None:
        """What the dispatcher would run in the end, or None where something could stand in between."""
        if _is_watched():
            return None
        given = None
        for at in self._tensors:
            x = args[at]
            if x is not None:
                if type(x) not in _PLAIN:
                    return None
                given = given if given is not None else x
        if given is None:
            return None
        return self._kernels.get("cuda" if given.is_cuda else given.device.type)

    def _make_function(self) -> Any:
        op = self

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, run: Function, *args: Any) -> Any:
                output = _below_autograd(run, args)
                if op._save is not None:
                    op._save(ctx, args, output)
                return output

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                if op._differentiate is None:
                    raise RuntimeError(f"{op.name}: has no derivative; each of our ops can be differentiated once")
                found = op._differentiate(ctx, *grads)
                found = found if isinstance(found, tuple) else (found,)
                return None, *(None if isinstance(grad, list) else grad for grad in found)

        return Differentiable

    def _dispatch(self, keyset: Any, *args: Any) -> Any:
        """The kernel of the autograd key."""
        run = self._kernel_for(args) or partial(self.overload.redispatch, keyset & _C._after_autograd_keyset)
        if _C.is_grad_enabled() and _C._any_requires_grad(*args):  # pyright: ignore[reportAttributeAccessIssue]
            return self._function.apply(run, *args)
        return _below_autograd(run, args)


def _below_autograd(run: Function, args: tuple[Any, ...]) -> Any:
    with _C._AutoDispatchBelowAutograd():
        return run(*args)


def _is_watched() -> bool:
    """Whether a mode, a transform, a tracer or a profiler is active."""
    return (
        _C._len_torch_dispatch_stack() > 0
        or _C._are_functorch_transforms_active()
        or _C._autograd._profiler_enabled()  # pyright: ignore[reportAttributeAccessIssue]
        or _C._get_tracing_state() is not None
    )


def custom_op(name: str, function: Function, schema: str | None = None, *, device: str | None = None) -> CustomOp:
    """Define an operator.

    Args:
        name: without the namespace.
        function: its implementation.
        schema: None takes the one that the function's annotations say.
        device: "cpu" if the function is for the host only; the others follow by `register_kernel`.
    """
    if schema is None:
        schema = torch.library.infer_schema(function, mutates_args=())
    op = CustomOp(name, schema)
    op.register_kernel(device, function)
    return op


def _opaque(function: Function) -> Function:
    """The function as a compiler that watches Python frames must see it: not at all."""

    def call(*args: Any) -> Any:
        if _C._dynamo.eval_frame.get_eval_frame_callback() in (None, False):  # pyright: ignore[reportAttributeAccessIssue]
            return function(*args)
        return torch.compiler.disable(function)(*args)

    return call
