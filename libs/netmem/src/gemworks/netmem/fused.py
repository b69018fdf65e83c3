"""Quantised saved activations inside a compiled region: the coding is part of its forward and backward graphs.

After the partitioner has chosen what forward saves for backward, a saved tensor that only generated kernels read is
replaced by its codes: an elementwise cast at the end of forward, which the compiler fuses into a kernel that makes or
reads the tensor, and a cast at the start of backward, which it fuses into the kernels that consume it. So coding costs
the write of one byte per element and saves the read of one. A tensor that a matrix product or attention reads in
backward stays as it is: its operand would have to be decoded into memory first. Under a budget
(`quantise_fused@0.85`) the partitioner makes such operands again where that is elementwise work.

Coded are intermediates of the graph and its inputs, never its parameters and outputs. As E5M2 without a scale: the
range of float16, two bits of mantissa, 25 dB per tensor. A scale would need the largest magnitude of a row before the
first code is written, which keeps the compiler from fusing the coding into an elementwise producer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

# smaller tensors stay as they are
MIN_NUMEL = 1 << 14
E5M2_MAX = 57344.0


def encode(x: torch.Tensor) -> torch.Tensor:
    """E5M2 codes of `x`. Magnitudes above 57344 saturate, below 2^-17 they become zero, a NaN stays one."""
    return x.clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A node with the value that tracing would give it."""
    node = graph.call_function(target, args)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    node.meta["val"] = target(*values)
    return node


def _encode_in(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """`encode` in the operators that it is made of for the compiler."""
    cast = torch.ops.prims.convert_element_type.default
    wide = _call(graph, cast, x, torch.float32)
    bounded = _call(graph, torch.ops.aten.clamp_min.default, wide, -E5M2_MAX)
    bounded = _call(graph, torch.ops.aten.clamp_max.default, bounded, E5M2_MAX)
    return _call(graph, cast, bounded, torch.float8_e5m2)


def _codable(x: Any) -> bool:
    # float32 beside 16-bit activations is a statistic of a norm or of attention
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    numel = x.numel()
    return not isinstance(numel, int) or numel >= MIN_NUMEL


def _read_by_generated_kernels_only(node: fx.Node, op_types: Any) -> bool:
    """Is every use elementwise, a reduction, or a view that is used like that?"""
    for user in node.users:
        if user.op != "call_function":
            return False
        if op_types.is_view(user):
            if not _read_by_generated_kernels_only(user, op_types):
                return False
        elif not op_types.is_fusible(user):
            return False
    return True


_RESHAPES = frozenset(
    (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)
)


def _where_encoding_fuses(saved: fx.Node, op_types: Any) -> list[fx.Node] | None:
    """Views from `saved` to what a generated kernel of forward reads or writes, so that it can write the codes as well.

    A permutation is followed, because a kernel that reads in another order is another kernel. None: only products read
    it, and coding it would be a kernel of its own.
    """
    if saved.op == "call_function" and op_types.is_fusible(saved) and not op_types.is_view(saved):
        return []
    found: list[list[fx.Node]] = []
    paths: list[list[fx.Node]] = [[]]
    while paths:
        path = paths.pop()
        for user in (path[-1] if path else saved).users:
            if user.op != "call_function":
                continue
            if user.target in _RESHAPES or user.target is torch.ops.aten.permute.default:
                paths.append([*path, user])
            elif op_types.is_fusible(user) and not op_types.is_view(user):
                found.append(path)
    # in the order that it has, if a kernel reads it so
    found.sort(key=lambda path: (sum(v.target is torch.ops.aten.permute.default for v in path), len(path)))
    if not found:
        return None
    return found[0] if any(v.target is torch.ops.aten.permute.default for v in found[0]) else []


def _undo_views(graph: fx.Graph, x: fx.Node, path: list[fx.Node]) -> fx.Node:
    """What was there before the views of a path."""
    for view in reversed(path):
        source = view.args[0]
        assert isinstance(source, fx.Node)
        if view.target in _RESHAPES:
            x = _call(graph, torch.ops.aten.reshape.default, x, list(source.meta["val"].shape))
        else:
            order: Any = view.args[1]
            dims = [d % len(order) for d in order]
            x = _call(graph, torch.ops.aten.permute.default, x, [dims.index(d) for d in range(len(dims))])
    return x


def code_saved(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, parameters: set[str]) -> list[str]:
    """Replace saved tensors by their codes where backward decodes them for nothing.

    Args:
        forward, backward: from a partitioner; changed in place.
        num_outputs: outputs of forward that are not saved tensors; they come first.
        parameters: names of placeholders of forward that stay alive anyway.

    Returns:
        Names of the tensors that are coded.
    """
    from torch._functorch.partitioners import get_default_op_list

    op_types = get_default_op_list()
    (output,) = forward.graph.find_nodes(op="output")
    outputs = list(output.args[0])
    arrives = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    first = next(node for node in backward.graph.nodes if node.op != "placeholder")
    coded: list[str] = []
    for at in range(num_outputs, len(outputs)):
        saved = outputs[at]
        if not isinstance(saved, fx.Node) or saved.name in parameters or saved in outputs[:num_outputs]:
            continue
        arriving = arrives.get(saved.name)
        if arriving is None or not _codable(saved.meta.get("val")):
            continue
        if not _read_by_generated_kernels_only(arriving, op_types):
            continue
        path = _where_encoding_fuses(saved, op_types)
        if path is None or any(not isinstance(n, int) for view in path for n in view.meta["val"].shape):
            continue
        dtype = saved.meta["val"].dtype
        with forward.graph.inserting_before(output):
            codes = _encode_in(forward.graph, path[-1] if path else saved)
        outputs[at] = codes
        users = list(arriving.users)
        arriving.meta["val"] = codes.meta["val"]
        arriving.meta.pop("tensor_meta", None)
        with backward.graph.inserting_before(first):
            decoded = _call(backward.graph, torch.ops.prims.convert_element_type.default, arriving, dtype)
            decoded = _undo_views(backward.graph, decoded, path)
        for user in users:
            user.replace_input_with(arriving, decoded)
        coded.append(saved.name)
    output.update_arg(0, tuple(outputs))
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return coded


class CodingPartitioner(CustomPartitionerFn):
    """AOTAutograd's partitioner, and then `code_saved`."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """The partitioner's interface: (forward, backward)."""
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        parameters = {inputs[i] for i in kwargs.get("static_lifetime_input_indices") or ()}
        code_saved(forward, backward, kwargs["num_fwd_outputs"], parameters)
        return forward, backward

    def uuid(self) -> Any:
        """For the compiler's cache: changes with this file."""
        return get_hash_for_files((__file__,))


def _eager(graph: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """As torch's backend "aot_eager_decomp_partition": the graphs that the compiler would get, run by eager kernels."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
        bw_compiler=lambda gm, _: make_boxed_func(gm.forward),
        decompositions=select_decomp_table,
        partition_fn=CodingPartitioner(),
    )(graph, example_inputs)


def coding_compiler(inner: str | Callable[..., Any] | None, patches: dict[str, Any]) -> Callable[..., Any]:
    """Compiler of a region that codes what it saves.

    Args:
        inner: None or "inductor", or "aot_eager_decomp_partition" to look at the graphs without generating code.
        patches: of inductor's configuration.

    Raises:
        ValueError: another backend, whose partitioner can't be extended.
    """
    from torch._functorch import config

    if inner in (None, "inductor"):
        from torch._inductor import config as inductor_config
        from torch._inductor.compile_fx import compile_fx

        patches = patches | {"custom_partitioner_fn": CodingPartitioner()}
        if hasattr(inductor_config.triton, "mix_order_reduction"):
            # a norm's backward that sums over rows as well took twice the time with a coded input (H200, torch 2.11)
            patches.setdefault("triton.mix_order_reduction", False)
        compiler = functools.partial(compile_fx, config_patches=patches)
    elif inner == "aot_eager_decomp_partition":
        compiler = _eager
    else:
        raise ValueError(f"compile_kwargs: quantise_fused works in inductor's partitioner, got backend {inner!r}")

    def compile_region(graph: Any, example_inputs: Any) -> Any:
        # the key of AOTAutograd's cache doesn't know the partitioner
        with config.patch(enable_autograd_cache=False):  # type: ignore[attr-defined]
            return compiler(graph, example_inputs)

    return compile_region
