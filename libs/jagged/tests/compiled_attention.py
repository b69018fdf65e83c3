"""Compile attention kernels for a GPU that need not be there, and print what came out, one JSON object a line.

Run in a process of its own by test_jagged_compile.py (a compiler that aborts takes its process along):

    python libs/jagged/tests/compiled_attention.py triton sm_90 bf16 128 1

The last argument is 1 for masks (triton) or for a shared query (gluon).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from compiled_signals import barriers, idle_barriers, signals
from gemworks.jagged.ops.attention_core import table
from triton.backends.compiler import GPUTarget

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS = 4
INTEGERS = ("left", "right", "total", "tiles_per_unit", "num_sequences", "radius", "unit")
FLOATS = ("lse", "delta", "scratch", "position", "time", "d_position", "d_time", "cos", "sin", "norms", "norm")
BUCKETS = 32
IN_TURN = {
    "softmax": table.GluonConfig(128, 2, resident_stages=2, one_release=True, in_turn=True),
    "fast_gelu": table.GluonConfig(64, 3, 3, 160, resident_stages=2, one_release=True, in_turn=True),
}


def arguments(
    kernel: Any, constants: dict[str, Any], dtype: str
) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Signature, constants and alignments, from the names of the kernel's parameters."""
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        assert not kernel.params[i].is_constexpr, f"{name} has no value, here or in the launch"
        base = name.removesuffix("_ptr")
        if base in FLOATS:
            kind = "*fp32"
        elif base in ("times_q", "times_k"):
            kind = "*i64"
        elif base.startswith("bounds") or base in ("tile_sample", "tile_row", "num_tiles", "turn", "counter"):
            kind = "*i32"
        elif base == "scale":
            kind = "fp32"
        elif base.endswith(("_st", "_sn", "stride_t", "stride_n")) or base in INTEGERS:
            kind = "i32"
        else:
            kind = f"*{dtype}"
        signature[name] = kind
        if kind[0] == "*" or (base.endswith(("_st", "_sn", "stride_t", "stride_n")) and not base.startswith("norm")):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, {(kernel.arg_names.index(n),): value for n, value in constants.items()}, attributes


def describe(
    kernel: Any, name: str, box: tuple[int, ...], dtype: str, signature: dict[str, str], attributes: dict[Any, Any]
) -> None:
    """Makes the parameter a descriptor of boxes of that shape."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for(list(box), {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype])
    signature[name] = f"tensordesc<{dtype}[{','.join(map(str, box))}],{layout!r}>"
    attributes.pop((kernel.arg_names.index(name),), None)


def report(label: str, compiled: Any) -> None:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True
        )
        sass = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found, usage.stdout + usage.stderr
    counts = {
        name: len(re.findall(rf"\b{name}\b", sass))
        for name in ("HGMMA", "HMMA", "UTCHMMA", "STL", "LDL", "FFMA", "FMUL")
    }
    counts["waits"] = len(re.findall(r"WARPGROUP\.DEPBAR", sass))
    row = {"label": label, "registers": int(found[1]), "stack": int(found[2]), "shared": compiled.metadata.shared}
    ttgir = compiled.asm["ttgir"]
    counts |= signals(compiled.asm["ptx"]) | {"barriers": len(barriers(ttgir)), "idle_barriers": idle_barriers(ttgir)}
    counts["turns"] = compiled.asm["ptx"].count("bar.arrive")
    print(json.dumps(row | counts), flush=True)


def compile_triton(
    step: str, activation: str, architecture: str, dtype: str, width: int, masked: bool, biased: bool = False,
    back: bool = False,
) -> None:  # fmt: skip
    """`back`: dK ends in the backward of k's norm and rotation."""
    from gemworks.jagged.ops.attention_core import kernel_backward, kernel_forward
    from triton.compiler import ASTSource

    shape = table.Shape(activation, DTYPES[dtype], width, width, masked, False, False, 1024, biased=biased)
    sums = step == "backward_bias"
    config = table.bias_config(shape) if sums else table.triton_config(step, shape)  # pyright: ignore[reportArgumentType]
    kernel = {
        "backward_bias": kernel_backward.backward_bias_kernel,
        "forward": kernel_forward.forward_kernel,
        "backward_kv": kernel_backward.backward_kv_kernel,
        "backward_q": kernel_backward.backward_q_kernel,
    }[step]
    constants = {
        "ACT": activation, "MASKED": masked, "BOTTOM_RIGHT": True, "SHARED": False, "GROUP": 1, "H": width, "V": width,
        "BH": width, "BV": width, "BM": config.block_m, "BN": config.block_n, "PRECISION": "tf32",
        "HEADS_K" if step == "backward_kv" else "HEADS": HEADS, "BY_POSITION": biased,
        "BUCKETS": BUCKETS if biased else 0,
    }  # fmt: skip
    if sums:
        del constants["ACT"]
        constants |= {"BB": BUCKETS, "W": triton.next_power_of_2(config.block_m + config.block_n), "WORKERS": 256}
    if step == "backward_kv":
        constants |= norm_rope_back(back, ("cos", "sin", "norms", "norm_st"))
    source = ASTSource(kernel, *arguments(kernel, constants, dtype))
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    label = f"{step} {activation} {config}{' norm rope' if back else ''}"
    report(label, triton.compile(source, target=target, options=options))


def compile_gluon(
    step: table.Step,
    activation: str,
    config: table.GluonConfig,
    dtype: str,
    width: int,
    masked: bool = False,
    **options: Any,
) -> None:
    from gemworks.jagged.ops.attention_core import kernel_backward_pair_hopper, kernel_forward_hopper
    from triton.experimental.gluon._runtime import GluonASTSource

    constants: dict[str, Any] = {
        "ACT": activation,
        "HEADS": HEADS,
        "H": width,
        "STAGES": config.stages,
        "SHARED": False,
    }
    constants["CONSUMER_REGS"] = config.registers
    kernel: Any
    if step == "forward":
        kernel = kernel_forward_hopper.forward_hopper_kernel
        described = {"q_desc": 64, "k_desc": config.block, "v_desc": config.block}
        constants |= {"GROUP_HEADS": 1, "HV": width, "BN": config.block, "QSTAGES": config.resident_stages}
        constants |= {"GROUPS": config.groups, "FOLD": activation == "fast_gelu" and dtype == "bf16"}
        constants["ONE_RELEASE"] = config.one_release
        constants |= {"MASKED": masked, "BOTTOM_RIGHT": True, "CHAINED": config.chained}
        constants["IN_TURN"] = config.in_turn and not masked
    else:
        kernel = kernel_backward_pair_hopper.backward_hopper_kernel
        described = {"a_desc": 64, "b_desc": 64, "c_desc": config.block, "d_desc": config.block}
        constants |= {
            "KV": step == "backward_kv",
            "BC": config.block,
            "RSTAGES": config.resident_stages,
            "GROUPS": config.groups,
        }
    constants |= options
    signature, constexprs, attributes = arguments(kernel, constants, dtype)
    for name, rows in described.items():
        describe(kernel, name, (1, 1, rows, 1, width), dtype, signature, attributes)
    source = GluonASTSource(kernel, signature, constexprs=constexprs, attrs=attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": config.max_registers}
    )
    report(f"{step} {activation} {config}", compiled)


def compile_fused(
    activation: str, config: table.FusedConfig, dtype: str, shared: bool, masked: bool = False, back: bool = False
) -> None:
    """`back`: dK ends in the backward of k's norm and rotation."""
    from gemworks.jagged.ops.attention_core.kernel_backward_fused_hopper import backward_fused_hopper_kernel as kernel
    from triton.experimental.gluon._runtime import GluonASTSource

    constants: dict[str, Any] = {
        "ACT": activation, "HEADS": HEADS, "H": table.FUSED_HEAD_DIM, "STAGES": config.stages,
        "KSTAGES": config.key_stages, "SHARED": shared, "EARLY": config.early, "AHEAD": config.ahead,
        "CONSUMER_REGS": config.registers, "MASKED": masked, "BOTTOM_RIGHT": True,
        **norm_rope_back(back, ("cos_ptr", "sin_ptr", "norm_ptr", "norm_stride_t")),
    }  # fmt: skip
    signature, constexprs, attributes = arguments(kernel, constants, dtype)
    for name in ("q_desc", "k_desc", "v_desc", "do_desc"):
        describe(kernel, name, (1, 1, 64, 1, table.FUSED_HEAD_DIM), dtype, signature, attributes)
    source = GluonASTSource(kernel, signature, constexprs=constexprs, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    label = f"backward {activation} {config}{' masked' if masked else ''}{' norm rope' if back else ''}"
    report(label, compiled)


def norm_rope_back(on: bool, names: tuple[str, ...]) -> dict[str, Any]:
    """Constants of dK's end; without it the arguments that it would read are None."""
    return {"NORM": on, "ROPE": on, **({} if on else dict.fromkeys(names))}


def activations_of(backend: str, kind: str) -> list[str]:
    if backend in ("gluon", "gluon-usual"):
        return ["softmax"] if kind == "softmax" else ["fast_gelu"]
    others = ["identity", "squared_relu", "gelu", "gelu_tanh", "silu", "fast_silu"]
    return [] if kind == "softmax" else [*others, "leaky_relu", "hardswish", "tanh", "relu"]


def main(backend: str, architecture: str, dtype: str, width: str, masked: str) -> None:
    if backend == "triton":
        for step in table.STEPS:
            for activation in ("softmax", "fast_gelu"):
                compile_triton(step, activation, architecture, dtype, int(width), masked == "1")
        return
    if backend == "triton-bias":
        for step in (*table.STEPS, "backward_bias"):
            compile_triton(step, "softmax", architecture, dtype, int(width), masked == "1", biased=True)
        return
    if backend == "norm-rope-back":  # the kernels of dK that end in the backward of k's norm and rotation
        if architecture == "sm_90" and int(width) == table.FUSED_HEAD_DIM:
            shared = masked == "1"
            compile_fused("softmax", table.FUSED["softmax", "long"], dtype, shared, back=True)
            if not shared:
                compile_fused("softmax", table.FUSED["softmax", "long"], dtype, shared, masked=True, back=True)
        compile_triton("backward_kv", "softmax", architecture, dtype, int(width), False, back=True)
        return
    if backend == "gluon-masked":
        for kind, config in table.GLUON_MASKED.items():
            activation = "softmax" if kind == "softmax" else "fast_gelu"
            compile_gluon("forward", activation, config, dtype, int(width), masked=True)
            if int(width) == table.FUSED_HEAD_DIM:
                compile_fused(activation, table.FUSED[kind, "long"], dtype, shared=False, masked=True)
        return
    # What a batch of long sequences takes; "gluon" is the whole table.
    done: set[Any] = set()
    steps = ("forward",) if backend == "gluon-usual" else table.STEPS
    shipped = table.GLUON | (table.GLUON_NARROW if int(width) == table.NARROW_HEAD_DIM else {})
    for (step, kind, lengths), config in shipped.items():
        if backend == "gluon-usual" and lengths != "long":
            continue
        for activation in activations_of(backend, kind):
            if step in steps and (step, activation, config) not in done:
                done.add((step, activation, config))
                compile_gluon(step, activation, config, dtype, int(width), SHARED=masked == "1")
    if backend == "gluon":  # in no table, but to be asked for
        for activation, config in IN_TURN.items():
            compile_gluon("forward", activation, config, dtype, int(width), SHARED=masked == "1")
    for (kind, _), fused in table.FUSED.items() if int(width) == table.FUSED_HEAD_DIM else ():
        for activation in activations_of(backend, kind):
            if (activation, fused) not in done:
                done.add((activation, fused))
                compile_fused(activation, fused, dtype, masked == "1")


if __name__ == "__main__":
    main(*sys.argv[1:])
