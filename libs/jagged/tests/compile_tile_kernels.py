"""Compile the norm and BlockAttention kernels for a GPU that need not be there; one JSON line per kernel.

    python compile_tile_kernels.py sm_90 [PATTERN]

Each line says registers, stack (spills), shared memory, how many of the loads and stores are 16 bytes wide, how many
loads bring one value of 2 bytes, and how many copy ahead of time.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from compiled_signals import barriers, idle_barriers
from gemworks.jagged.ops.block_attention import kernel_block
from gemworks.jagged.ops.block_attention.launch import block_config
from gemworks.jagged.ops.norms import kernel_norm, kernel_norm_pieces
from gemworks.jagged.ops.norms.configs import NormConfig, norm_config
from gemworks.jagged.ops.norms.launch import stride_unit
from gemworks.jagged.ops.token_map import kernel_token_map
from gemworks.jagged.ops.token_map import launch as token_map_launch
from gemworks.jagged.schedule_op import KERNEL_CONFIG
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

INDICES = ("bounds_q", "bounds_k", "tile_sample", "tile_row", "num_tiles", "end", "end_ptr")
TENSORS = ("q", "k", "v", "h", "y", "residual", "add", "weight", "bias")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compile_kernel(
    kernel: Any, pointer: Callable[[str], str], constants: dict[str, Any], capability: int, **options: Any
) -> dict[str, Any]:
    """Resources of one kernel; pointers are multiples of 16, and strides that don't count in units of their own."""
    unit = constants.get("UNIT", 1)
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in INDICES:
            signature[name] = "*i32"
        elif name in TENSORS or name.endswith(("_ptr", "_desc")):
            signature[name] = pointer(name)
        else:
            signature[name] = "fp32" if name in ("eps", "scale", "scale_log2") else "i32"
        strides = ("_outer", "_inner", "_st", "_sn", "_stride_t") if unit == 1 else ()
        if name in TENSORS or name.endswith(("_ptr", *strides)):
            attributes[(i,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    kind: Any = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(kernel, signature, constexprs=constexprs, attrs=attributes)
    return resources(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options))


def resources(compiled: Any) -> dict[str, Any]:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        sass = _output(tools / "nvdisasm", "-c", file.name)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    return {
        "registers": int(registers),
        "stack_bytes": int(stack),
        "barriers": len(barriers(compiled.asm["ttgir"])),
        "idle_barriers": idle_barriers(compiled.asm["ttgir"]),
        "shared_bytes": compiled.metadata.shared,
        "wide_loads": len(re.findall(r"LDG\.E\.128|LDGSTS\.E\.[A-Z.]*128", sass)),
        "narrow_loads": len(re.findall(r"LDG\.E\.[US](?:8|16)\b", sass)),
        "async_copies": len(re.findall(r"\bLDGSTS\b", sass)),
        "wide_stores": len(re.findall(r"STG\.E\.128", sass)),
        "stores": len(re.findall(r"\bSTG\b", sass)),
        "matrix_products": len(re.findall(r"\b(?:HGMMA|HMMA|UTCHMMA|UTCOMMA)\b", sass)),
    }


def _output(*command: Any) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


# Widths of which none is a power of two, and the last is divided by nothing: values are read one by one there.
NORM_WIDTHS = (64, 128, 512, 1024, 1536, 8192, 1000, 3000, 3072, 6000, 1001)
IN_PIECES = {
    1000: NormConfig(1, 2, 3, programs=8, columns=1024),
    1536: NormConfig(1, 4, 3, programs=4, columns=512),
    3000: NormConfig(1, 8, 3, programs=2, columns=1024),
    6000: NormConfig(1, 16, 3, programs=1, columns=2048),
}


def norm_cases() -> dict[str, tuple[Any, Callable[[str], str], dict[str, Any], dict[str, Any]]]:
    cases = {}
    for width in NORM_WIDTHS:
        for full in (False, True):
            name = f"{width} {'full' if full else 'plain'}"
            config = norm_config(width)
            flags = {"HAS_RESIDUAL": True, "HAS_WEIGHT": full, "HAS_BIAS": full, "HAS_ADD": full}
            constants = {
                "D": width, "BLOCK_D": triton.next_power_of_2(width), "INNER": 1, "UNIT": stride_unit(width),
                "CENTER": full, "ROWS": config.rows, **flags,
            }  # fmt: skip
            cases[f"norm_fwd {name}"] = (
                kernel_norm.norm_fwd_kernel, lambda _: "*bf16", constants, {"num_warps": config.num_warps},
            )  # fmt: skip
            cases[f"norm_bwd {name}"] = norm_bwd_case(width, full, norm_config(width, sums_columns=full))
    cases |= {f"norm_bwd_pieces {width} full": norm_bwd_case(width, True, c) for width, c in IN_PIECES.items()}
    return cases


def norm_bwd_case(
    width: int, full: bool, config: NormConfig
) -> tuple[Any, Callable[[str], str], dict[str, Any], dict[str, Any]]:
    constants: dict[str, Any] = {
        "D": width, "INNER": 1, "UNIT": stride_unit(width), "CENTER": full, "HAS_DH": full, "HAS_WEIGHT": full,
        "HAS_DWEIGHT": full, "HAS_DBIAS": full, "HAS_END": False, "STAGES": config.stages,
    }  # fmt: skip
    kernel: Any = kernel_norm.norm_bwd_kernel
    if config.columns is None:
        constants |= {"BLOCK_D": triton.next_power_of_2(width), "ROWS": config.rows}
    else:
        kernel = kernel_norm_pieces.norm_bwd_pieces_kernel
        constants |= {"BLOCK_D": config.columns, "PIECES": -(-width // config.columns)}
    options = {"num_warps": config.num_warps}
    if (registers := config.max_registers()) is not None:
        options["maxnreg"] = registers
    return kernel, lambda n: "*fp32" if n in ("dweight_ptr", "dbias_ptr") else "*bf16", constants, options


def block_cases() -> dict[str, tuple[Any, Callable[[str], str], dict[str, Any], dict[str, Any]]]:
    cases = {}
    shapes = [("bf16", 64, 128, 1), ("bf16", 64, 64, 1), ("bf16", 64, 32, 1), ("fp16", 64, 96, 1)]
    shapes += [("bf16", 32, 128, 1), ("bf16", 128, 128, 1), ("bf16", 64, 128, 4), ("fp32", 64, 128, 1)]
    for dtype, block, width, group in shapes:
        for norm, rope in ((False, False), (False, True), (True, True)):
            front = f"{'norm ' if norm else ''}{'rope' if rope else ''}".strip() or "plain"
            for direction, kernel, heads in (
                ("forward", kernel_block.block_fwd_kernel, "HEADS"),
                ("backward", kernel_block.block_bwd_kernel, "KEY_HEADS"),
            ):
                constants = {
                    heads: 4, "GROUP": group, "H": width, "V": width, "BLOCK": block,
                    "BLOCK_J": max(triton.next_power_of_2(width // 2), 16), "BLOCK_V": triton.next_power_of_2(width),
                    "NORM": norm, "ROPE": rope, "CAUSAL": False, "PRECISION": "tf32",
                }  # fmt: skip
                config = block_config(block, direction, dtype=TYPES[dtype], group=group, rope=rope, qk_norm=norm)  # pyright: ignore[reportArgumentType]
                options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": 1}
                if config.max_registers is not None:
                    options["maxnreg"] = config.max_registers

                def pointer(name: str, dtype: str = dtype) -> str:
                    return {"table_ptr": "*i32", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}.get(name, f"*{dtype}")

                name = f"block_{direction} {dtype} {block} {width} group{group} {front}"
                cases[name] = (kernel, pointer, constants, options)
    return cases


def schedule_cases() -> dict[str, tuple[Any, Callable[[str], str], dict[str, Any], dict[str, Any]]]:
    from gemworks.jagged._triton import kernel_schedule

    sizes = {name: value for name, value in KERNEL_CONFIG.items() if name != "num_warps"}
    tiles = {"HEIGHTS": (128, 192, 128), "OF_KEYS": (False, False, True), "Q_PACKED": True, "K_PACKED": False}
    options = {"num_warps": KERNEL_CONFIG["num_warps"]}
    return {
        "schedule tiles": (kernel_schedule.schedule_kernel, lambda _: "*i32", tiles | sizes, options),
        "schedule blocks": (kernel_schedule.block_schedule_kernel, lambda _: "*i64", {"BLOCK": 64} | sizes, options),
    }


def epilogue_cases(gluon: bool) -> dict[str, tuple[Any, Callable[[str], str], dict[str, Any], dict[str, Any]]]:
    from gemworks.jagged.ops.gdpa import kernel_epilogue, launch_epilogue

    parts = dict.fromkeys(("CENTER", "HAS_RESIDUAL", "HAS_ADD", "HAS_WEIGHT", "HAS_BIAS"), True)
    plain = {
        "ACT": "fast_gelu", "HEADS": 4, "GROUP": 1, "H": 128, "V": 128, "BH": 128, "BV": 128, "BM": 128, "BN": 64,
        "PRECISION": "tf32", "BW": 512, "C": launch_epilogue.NORM_VALUES // 512,
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": 8, "num_stages": 3}
    cases: dict[str, Any] = {
        "epilogue triton": (kernel_epilogue.gdpa_norm_kernel, lambda _: "*bf16", plain | parts, options)
    }
    if gluon:
        from gemworks.jagged.ops.gdpa.kernel_epilogue_hopper import gdpa_norm_hopper_kernel
        from triton.experimental.gluon import language as gl

        config = launch_epilogue.GluonNormConfig()
        constants = {
            "ACT": "fast_gelu", "HEADS": 4, "H": 128, "BN": config.block, "STAGES": config.stages, "FOLD": True,
            "QSTAGES": config.resident_stages, "CONSUMER_REGS": config.registers,
            "FINISHER_REGS": config.norm_registers,
        }  # fmt: skip

        def pointer(name: str) -> str:
            if not name.endswith("_desc"):
                return "*bf16"
            rows = 64 if name == "q_desc" else config.block
            layout: Any = gl.NVMMASharedLayout.get_default_for([1, 1, rows, 1, 128], gl.bfloat16)
            return f"tensordesc<bf16[1,1,{rows},1,128],{layout!r}>"

        cases["epilogue gluon"] = (gdpa_norm_hopper_kernel, pointer, constants | parts, {"num_warps": 4})
    return cases


def token_map_cases() -> dict[str, tuple[Any, Callable[[str], str], dict[str, Any], dict[str, Any]]]:
    def pointer(name: str) -> str:
        return "*fp32" if name in ("weight_ptr", "base_ptr", "dweight_ptr", "dbase_ptr") else "*bf16"

    forward, backward = token_map_launch.FORWARD, token_map_launch.BACKWARD
    sizes = {"K": 256, "N": 32, "D": 512, "BLOCK_N": 32, "BLOCK_D": token_map_launch.BLOCK_D}
    return {
        f"token_map {name}": (
            kernel, pointer, sizes | {"BLOCK_K": block_k, "STAGES": config.stages}, {"num_warps": config.num_warps}
        )
        for name, kernel, block_k, config in (
            ("forward", kernel_token_map.token_map_fwd_kernel, token_map_launch.FORWARD_BLOCK_K, forward),
            ("backward", kernel_token_map.token_map_bwd_kernel, 256, backward),
        )
    }  # fmt: skip


def gluon_cases() -> dict[str, tuple[Any, Callable[[str], str], dict[str, Any], dict[str, Any]]]:
    from gemworks.jagged.ops.block_attention import kernel_block_hopper, launch

    cases = {}
    for (block, width), table, front in itertools.product(launch.GLUON_SHAPES, ("fp16", "fp32"), range(3)):
        norm, rope = ((False, False), (False, True), (True, True))[front]
        for direction, kernel, heads in (
            ("forward", kernel_block_hopper.block_fwd_hopper_kernel, "HEADS"),
            ("backward", kernel_block_hopper.block_bwd_hopper_kernel, "KEY_HEADS"),
        ):
            constants = {heads: 4, "H": width, "BLOCK": block, "NORM": norm, "ROPE": rope, "CAUSAL": False}
            config = launch.gluon_config(block, direction)  # pyright: ignore[reportArgumentType]
            options = {"num_warps": config.num_warps, "maxnreg": config.max_registers}

            def pointer(name: str, table: str = table) -> str:
                return {"table_ptr": "*i32", "cos_ptr": f"*{table}", "sin_ptr": f"*{table}"}.get(name, "*bf16")

            label = ("plain", "rope", "norm rope")[front]
            cases[f"gluon_{direction} {block} {width} {table} {label}"] = (kernel, pointer, constants, options)
    return cases


def main() -> None:
    architecture, pattern = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    line: dict[str, Any] = {"architecture": architecture}
    cases = norm_cases() | block_cases() | schedule_cases() | token_map_cases()
    cases |= epilogue_cases(architecture == "sm_90")
    cases |= gluon_cases() if architecture == "sm_90" else {}
    for name, (kernel, pointer, constants, options) in cases.items():
        if re.search(pattern, name):
            capability = int(architecture.removeprefix("sm_"))
            made = compile_kernel(kernel, pointer, constants, capability, **options)
            made |= {"threads": 32 * options["num_warps"]}
            print(json.dumps({"kernel": name} | line | made), flush=True)


if __name__ == "__main__":
    main()
