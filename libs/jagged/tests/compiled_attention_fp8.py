"""Compile the FP8 attention kernels for a GPU that need not be there, and print what came out, one JSON object a line.

Run in a process of its own by test_jagged_attention_fp8.py: `python compiled_attention_fp8.py gluon sm_90 128`.
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
from compiled_signals import barriers, idle_barriers
from triton.backends.compiler import GPUTarget


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes."""
    tool = next(Path(triton.__file__).parent.rglob("cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = [re.search(rf"{name}:(\d+)", text) for name in ("REG", "STACK")]
    assert all(found), text
    registers, stack = (int(m[1]) for m in found if m)
    return registers, stack


def types_of(names: list[str], special: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    rest = dict.fromkeys(("bounds_q", "bounds_k", "tile_sample", "tile_row", "num_tiles"), "*i32")
    rest |= {"scale": "fp32", "lse": "*fp32", "lse_ptr": "*fp32"}
    return {n: "constexpr" if n in constants else special.get(n, rest.get(n, "i32")) for n in names}


def gluon(capability: int, width: int) -> Any:
    from gemworks.jagged.ops.attention_fp8.kernel_fp8_hopper import fp8_hopper_kernel as kernel
    from gemworks.jagged.ops.attention_fp8.launch import HOPPER
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    def box(rows: int, columns: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float8e4nv)
        return f"tensordesc<fp8e4nv[{rows},{columns}],{layout!r}>"

    constants: dict[str, Any] = {"HEADS": 4, "GROUP_HEADS": 1, "H": width, "BN": HOPPER.block}
    constants |= {"STAGES": HOPPER.stages, "QSTAGES": HOPPER.query_stages}
    constants |= {"CONSUMER_REGS": HOPPER.registers}
    special = {"q_desc": box(64, width), "k_desc": box(HOPPER.block, width), "v_desc": box(width, HOPPER.block)}
    special |= dict.fromkeys(("sq_ptr", "sk_ptr", "sv_ptr"), "*u8") | {"out_ptr": "*bf16"}
    names = kernel.arg_names
    aligned = ("sq_ptr", "sk_ptr", "sv_ptr", "out_ptr", "out_stride_t", "out_stride_n")
    source = GluonASTSource(
        kernel,
        types_of(names, special, constants),
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


def values(capability: int, which: str) -> Any:
    from gemworks.jagged.ops.attention_fp8.kernel_dequantize import rows_kernel, tiles_kernel
    from gemworks.jagged.ops.attention_fp8.launch import SEARCH

    kernel: Any = rows_kernel if which == "rows" else tiles_kernel
    constants: dict[str, Any] = {"HEADS": 4, "H": 128}
    if which == "rows":
        constants |= {"BH": 128, "R": 32, "W": 32, "BM": 32}
    else:
        constants |= {"SEARCH": SEARCH, "TRANSPOSED": True}
    names = kernel.arg_names
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=types_of(names, {"codes": "*u8", "scales": "*u8", "offsets": "*i64", "out": "*bf16"}, constants),
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in ("codes", "out", "code_st") if n in names},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


def codes(capability: int, step: str) -> Any:
    """A kernel that reads squares and rounds all that it may, heads of 128 in bf16, without a mask."""
    from gemworks.jagged.ops.attention_core.table import codes_config
    from gemworks.jagged.ops.attention_fp8 import kernel_codes

    name, _, activation = step.partition(":")
    steps = {
        "forward": (kernel_codes.forward_codes_kernel, "forward", "HEADS", ["ROUND_P"]),
        "kv": (kernel_codes.backward_kv_codes_kernel, "backward_kv", "HEADS_K", ["ROUND_P", "ROUND_DS"]),
        "q": (kernel_codes.backward_q_codes_kernel, "backward_q", "HEADS", ["ROUND_DS"]),
    }
    kernel: Any
    kernel, of_table, heads, rounded = steps[name]
    config = codes_config(of_table, activation, torch.bfloat16, 128)
    constants: dict[str, Any] = {"ACT": activation, "MASKED": False, "BOTTOM_RIGHT": True, heads: 4, "GROUP": 1}
    constants |= {"H": 128, "V": 128, "BH": 128, "BV": 128, "BM": config.block_m, "BN": config.block_n}
    constants |= {"PRECISION": "ieee", "QR": 32, "VR": 32, **dict.fromkeys(rounded, True)}
    special = dict.fromkeys(("q", "k", "v", "sq", "sk", "sv"), "*u8") | {"lse": "*fp32", "delta": "*fp32"}
    special |= dict.fromkeys(("do", "out", "dq", "dk", "dv"), "*bf16")
    names = kernel.arg_names
    aligned = [n for n in names if n in special or n.endswith("_st")]
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=types_of(names, special, constants),
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


if __name__ == "__main__":
    which, architecture, last = sys.argv[1:]
    capability = int(architecture[3:])
    make = {"gluon": lambda: gluon(capability, int(last)), "values": lambda: values(capability, last)}
    compiled = make.get(which, lambda: codes(capability, last))()
    registers, spilled = resources(compiled.asm["cubin"])
    print(
        json.dumps(
            {
                "kernel": which,
                "registers": registers,
                "spill_bytes": spilled,
                "shared": compiled.metadata.shared,
                "fp8_products": len(re.findall(r"wgmma.mma_async[.\w]*k32.f32.e4m3.e4m3", compiled.asm["ptx"])),
                "other_products": len(re.findall(r"wgmma.mma_async[.\w]*bf16", compiled.asm["ptx"])),
                "barriers": len(barriers(compiled.asm["ttgir"])),
                "idle_barriers": idle_barriers(compiled.asm["ttgir"]),
                "shuffled_bytes": compiled.asm["ptx"].count("prmt"),
            }
        )
    )
