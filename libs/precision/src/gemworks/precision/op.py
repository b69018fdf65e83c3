"""`define_op`: an opaque operator, as `torch.library.custom_op` makes it but for its look at every tensor of a call.

torch's own asks after each call whether a result shares memory with an argument, which took a millisecond on the host
of an H200 (torch 2.11), as long as everything else that a layer does. Our ops return new tensors, and `opcheck` in the
tests says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "gemworks_precision"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define_op(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define `torch.ops.gemworks_precision.<name>`.

    Args:
        name: without the namespace.
        function: the implementation for all devices; its annotations are the schema. Mutates nothing.
        fake: sizes, strides and dtypes of the results, for the compiler.
    """
    schema = torch.library.infer_schema(function, mutates_args=())
    full = f"{NAMESPACE}::{name}"
    torch.library.define(full, schema, lib=_library, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, _opaque(function), "CompositeExplicitAutograd")
    torch.library.register_fake(full, fake, lib=_library)


def differentiate(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """The derivative of an op, as for `torch.library.register_autograd`."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library)


def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a compiler that watches Python frames must see it: not at all."""

    def call(*args: Any) -> Any:
        if torch._C._dynamo.eval_frame.get_eval_frame_callback() in (None, False):  # pyright: ignore[reportAttributeAccessIssue]
            return function(*args)
        return torch.compiler.disable(function)(*args)

    return call
