"""Compile every Triton kernel for GPUs that need not be there: `python -m gemworks.precision.compile_kernels sm_90`.

A second argument is a regular expression over "kernel variant". Prints one JSON object a line: kernel, variant,
registers, spilled bytes, shared memory. Run it in a process of its own: Triton may abort on an architecture that it
cannot serve. Registers and spills come from the `cuobjdump` in Triton's wheel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Variant = tuple[str, str, Any, dict[str, str], dict[str, Any], int, int | None]
# Block and whether four of them are merged, by kind of cast.
KINDS = {"mxfp8": (32, False), "block128": (128, False), "regroup128": (32, True)}


def argument_types(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    """Types of the arguments that are not constants: as named, otherwise by convention, 32-bit integers."""
    named = {"seed": "i64", "normalise": "fp32", "eps": "fp32"}
    return {n: pointers.get(n, named.get(n, "i32")) for n in kernel.arg_names if n not in constants}


def tile_variants() -> Iterator[Variant]:
    """The tile kernels on bf16."""
    from gemworks.precision.kernel_activation import activation_gradient_kernel, activation_tile_kernel
    from gemworks.precision.kernel_common import FORMATS, MODES
    from gemworks.precision.kernel_norm_tile import norm_cast_kernel
    from gemworks.precision.kernel_tile import cast_tile_kernel
    from gemworks.precision.tiles import fused_tile_config, norm_sum_tile, tile_config

    base = {"FORMAT": FORMATS["e4m3"], "MODE": MODES["rceil"], "RAGGED": False, "HARDWARE": True}
    pairs = dict.fromkeys(("x_ptr", "residual_ptr", "sum_ptr", "y_ptr", "codes_ptr"), "*i32")
    pointers = {**pairs, "codes_t_ptr": "*i64", "inexact_ptr": "*i64"}
    pointers |= {"weight_ptr": "*bf16", "bias_ptr": "*bf16", "mean_ptr": "*fp32", "rstd_ptr": "*fp32"}
    pointers |= {"ready_ptr": "*i32"}
    for kind, (block, regroup) in KINDS.items():
        pointers |= dict.fromkeys(("scales_ptr", "scales_t_ptr"), "*u8" if kind == "mxfp8" else "*fp32")
        for directions, name in ((1, "rows"), (2, "columns"), (3, "both")):
            config = tile_config(block, regroup, directions)
            constants = {**base, "R8": config.rows // 8, "C": config.columns, "B": block, "REGROUP": regroup}
            constants |= {"DIRECTIONS": directions, "PACKED": True}
            types = argument_types(cast_tile_kernel, pointers, constants)
            limit = config.max_registers
            yield "cast_tile", f"{kind} {name}", cast_tile_kernel, types, constants, config.num_warps, limit
        config = fused_tile_config(block, regroup, 3)
        constants |= {"ACTIVATION": 3, "WRITE_Y": False, "R8": config.rows // 8, "C": config.columns}
        del constants["PACKED"]
        types = argument_types(activation_tile_kernel, pointers, constants)
        limit = config.max_registers
        squares = (False, True) if kind == "block128" else (False,)
        for square in squares:
            name, own = f"{kind}{' squares' * square}", constants | {"SQUARES": square}
            yield "activation_tile", name, activation_tile_kernel, types, own, config.num_warps, limit
        backward = {"WRITE_DX" if name == "WRITE_Y" else name: value for name, value in constants.items()}
        types = argument_types(
            activation_gradient_kernel, pointers | dict.fromkeys(("dy_ptr", "dx_ptr"), "*i32"), backward
        )
        yield "activation_gradient", kind, activation_gradient_kernel, types, backward, config.num_warps, limit
        rows, width = norm_sum_tile(config, 1024)
        norms = {"HAS_RESIDUAL": True, "HAS_BIAS": False, "SUBTRACT_MEAN": False, "WRITE_Y": False, "DIRECTIONS": 3}
        norms |= {"ROWS": rows, "STEPS": 4, "WIDTH": width}
        constants = {**base, **norms, "R8": config.rows // 8, "C": config.columns, "B": block, "REGROUP": regroup}
        types = argument_types(norm_cast_kernel, pointers, constants)
        for square in squares:
            name, own = f"{kind}{' squares' * square}", constants | {"SQUARES": square}
            yield "norm_tile", name, norm_cast_kernel, types, own, config.num_warps, limit
    from gemworks.precision.kernel_norm_backward import norm_backward_kernel

    constants = {"SUBTRACT_MEAN": False, "HAS_BIAS": False, "ADD": True, "ROWS": 2, "C": 1024}
    backward: dict[str, str] = dict.fromkeys(("dy_ptr", "hidden_ptr", "weight_ptr", "d_hidden_ptr", "dx_ptr"), "*bf16")
    backward |= dict.fromkeys(("mean_ptr", "rstd_ptr", "d_weight_ptr", "d_bias_ptr"), "*fp32")
    types = argument_types(norm_backward_kernel, backward, constants)
    yield "norm_backward", "1024", norm_backward_kernel, types, constants, 8, None
    from gemworks.precision.kernel_square import cast_squares_kernel, cast_weight_kernel
    from gemworks.precision.kernel_square_tile import cast_square_tile_kernel
    from gemworks.precision.tiles import square_config
    from gemworks.precision.triton_squares import SQUARES_WARPS

    squares = {**pointers, "square_ptr": "*fp32"}
    types = argument_types(cast_squares_kernel, squares, base)
    yield "cast_squares", "block128", cast_squares_kernel, types, base, SQUARES_WARPS, None
    for kind, (block, regroup) in KINDS.items():
        config = square_config(block, regroup)
        constants = {**base, "R8": config.rows // 8, "C": config.columns, "B": block, "REGROUP": regroup}
        types = argument_types(
            cast_square_tile_kernel, {**pointers, "scales_ptr": "*u8", "wide_ptr": "*fp32"}, constants
        )
        yield "cast_square_tile", kind, cast_square_tile_kernel, types, constants, config.num_warps, None
    weights = {name: value for name, value in base.items() if name != "RAGGED"} | {"DIRECTIONS": 3}
    for name, packed in (("bf16", True), ("fp32", False)):
        constants = {**weights, "PACKED": packed}
        types = argument_types(
            cast_weight_kernel, {**squares, "w_ptr": "*i32" if packed else "*fp32", "square_t_ptr": "*fp32"}, constants
        )
        yield "cast_weight", name, cast_weight_kernel, types, constants, SQUARES_WARPS, None


def tensor_variants() -> Iterator[Variant]:
    """One scale for a tensor: bf16 activations, and fp32 weights."""
    from gemworks.precision.kernel_common import FORMATS
    from gemworks.precision.kernel_tensor import amax_kernel, cast_tensor_kernel
    from gemworks.precision.triton_tensor import WARPS

    pointers = {"codes_ptr": "*i32", "codes_t_ptr": "*i64", "amax_ptr": "*i32", "scale_ptr": "*fp32"}
    for name, x, packed in (("bf16", "*i32", True), ("fp32", "*fp32", False)):
        constants: dict[str, Any] = {"PACKED": packed, "RAGGED": False, "HARDWARE": True}
        types = argument_types(amax_kernel, pointers | {"x_ptr": x}, constants)
        yield "amax", name, amax_kernel, types, constants, WARPS["num_warps"], None
        for format in ("e4m3", "e5m2"):
            own = constants | {"DIRECTIONS": 3, "FORMAT": FORMATS[format], "POWER_OF_TWO": False}
            types = argument_types(cast_tensor_kernel, pointers | {"x_ptr": x}, own)
            yield "cast_tensor", f"{name} {format}", cast_tensor_kernel, types, own, WARPS["num_warps"], None


def variants() -> Iterator[Variant]:
    """(kernel, variant, function, argument types, constants, warps, limit of registers) of what the launchers ask
    for."""
    yield from tile_variants()
    yield from tensor_variants()
    for kernel in general_variants():
        yield (*kernel, None)


def head_tile_variants() -> Iterator[tuple[str, str, Any, dict[str, str], dict[str, Any], int]]:
    """Tiles of q, k and v."""
    from gemworks.precision.head_tiles import MIN_BYTE, SEARCH
    from gemworks.precision.kernel_common import FORMATS, MODES
    from gemworks.precision.kernel_head_tile import head_tile_kernel

    base = {"HEADS": 4, "H": 128, "SEARCH": SEARCH, "MIN_BYTE": MIN_BYTE, "FORMAT": FORMATS["e4m3"]}
    base |= {"MODE": MODES["rceil"], "HARDWARE": True}
    pointers = {"x_ptr": "*bf16", "offsets_ptr": "*i64", "codes_ptr": "*u8", "scales_ptr": "*u8"}
    for transposed, name in ((False, "rows"), (True, "transposed")):
        constants: dict[str, Any] = {**base, "TRANSPOSED": transposed}
        types = argument_types(head_tile_kernel, pointers, constants)
        yield "head_tile", name, head_tile_kernel, types, constants, 8


ROWS_POINTERS = {
    "x_ptr": "*bf16",
    "codes_ptr": "*u8",
    "scales_ptr": "*u8",
    "inexact_ptr": "*i64",
    "signs_ptr": "*fp32",
    "wide_ptr": "*fp32",
}
BOTH_POINTERS = {**ROWS_POINTERS, "codes_t_ptr": "*u8", "scales_t_ptr": "*u8"}


def general_flags() -> dict[str, Any]:
    """What all general casts are compiled for."""
    from gemworks.precision.kernel_common import FORMATS, MODES

    flags = {"FORMAT": FORMATS["e4m3"], "MODE": MODES["rceil"], "REGROUP": False, "STOCHASTIC": False}
    return {**flags, "HARDWARE": True}


def general_variants() -> Iterator[tuple[str, str, Any, dict[str, str], dict[str, Any], int]]:
    """The general kernels."""
    yield from cast_variants()
    yield from fused_variants()
    yield from reading_variants()


def cast_variants() -> Iterator[tuple[str, str, Any, dict[str, str], dict[str, Any], int]]:
    """The general casts."""
    from gemworks.precision import kernel_cast as kc
    from gemworks.precision.triton_casts import both_config, rows_config

    base, types, rows_pointers, both_pointers = general_flags(), argument_types, ROWS_POINTERS, BOTH_POINTERS
    for kind, (block, regroup) in KINDS.items():
        for variant, extra in (("", {}), (" stochastic", {"STOCHASTIC": True})):
            flags = {**base, "REGROUP": regroup, **extra}
            for transposed in (False, True):
                config = rows_config(block, regroup, 0, transposed, flags["STOCHASTIC"])
                constants = {
                    **flags,
                    "ROWS": config.rows,
                    "COLUMNS": config.columns,
                    "BLOCK": block,
                    "STREAM": 1 if transposed else 0,
                    "HADAMARD": 0,
                    "SWAP": False,
                    ("stride_row" if transposed else "stride_column"): 1,
                }
                name = kind + variant + (" transposed" if transposed else "")
                kernel = kc.cast_rows_kernel
                yield "cast_rows", name, kernel, types(kernel, rows_pointers, constants), constants, config.num_warps
            both = both_config(block, regroup, flags["STOCHASTIC"])
            strips = {"SUB_ROWS": both.sub_rows, "SUB_COLUMNS": both.sub_columns}
            tile = {"ROWS": both.rows, "COLUMNS": both.columns, **strips}
            constants = {**flags, **tile, "BLOCK": block, "stride_column": 1}
            kernel = kc.cast_both_kernel
            arguments = types(kernel, both_pointers, constants)
            yield "cast_both", kind + variant, kernel, arguments, constants, both.num_warps
            tile = 128 if block == 128 or regroup else 64
            constants = {**flags, "TILE": tile, "BLOCK": block, "stride_column": 1}
            kernel = kc.cast_square_kernel
            arguments = types(kernel, rows_pointers, constants)
            yield "cast_square", kind + variant, kernel, arguments, constants, 8 if tile == 128 else 4
    for size in (32, 64, 128, 256):
        for transposed in (False, True):
            config = rows_config(32, False, size, transposed, False)
            constants = {
                **base,
                "ROWS": config.rows,
                "COLUMNS": config.columns,
                "BLOCK": 32,
                "STREAM": 0,
                "HADAMARD": size,
                "SWAP": False,
                ("stride_row" if transposed else "stride_column"): 1,
            }
            kernel = kc.cast_rows_kernel
            name = f"hadamard{size}" + (" transposed" if transposed else "")
            yield "cast_rows", name, kernel, types(kernel, rows_pointers, constants), constants, config.num_warps


def fused_variants() -> Iterator[tuple[str, str, Any, dict[str, str], dict[str, Any], int]]:
    """The general norm + cast, the projection + cast, and tiles of q, k and v."""
    from gemworks.precision.kernel_common import FORMATS, MODES
    from gemworks.precision.kernel_norm import norm_cast_kernel
    from gemworks.precision.kernel_project import project_kernel
    from gemworks.precision.projection import BLOCK_FEATURES, BLOCK_ROWS, GROUP
    from gemworks.precision.tiles import norm_config

    for kind, (block, regroup) in KINDS.items():
        rows, columns, num_warps = norm_config(1024, kind != "mxfp8")
        constants = {
            **general_flags(),
            "REGROUP": regroup,
            "HAS_RESIDUAL": True,
            "HAS_BIAS": False,
            "SUBTRACT_MEAN": False,
            "WRITE_Y": False,
            "DIRECTIONS": 3,
            "ROWS": rows,
            "COLUMNS": columns,
            "BLOCK": block,
        }
        halves = dict.fromkeys(("residual_ptr", "weight_ptr", "bias_ptr", "sum_ptr", "y_ptr"), "*bf16")
        pointers = {**BOTH_POINTERS, **halves, "mean_ptr": "*fp32", "rstd_ptr": "*fp32", "eps": "fp32"}
        arguments = argument_types(norm_cast_kernel, pointers, constants)
        yield "norm_cast", kind, norm_cast_kernel, arguments, constants, num_warps
    constants = {"HAS_BIAS": False, "D": 128, "BM": BLOCK_ROWS, "BK": BLOCK_FEATURES, "GROUP": GROUP}
    constants |= {"FORMAT": FORMATS["e4m3"], "MODE": MODES["rceil"], "HARDWARE": True, "PRECISION": "ieee"}
    halves = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "values_ptr"), "*bf16")
    arguments = argument_types(project_kernel, {**halves, "codes_ptr": "*u8", "scales_ptr": "*u8"}, constants)
    yield "project", "", project_kernel, arguments, constants, 8
    yield from head_tile_variants()


def reading_variants() -> Iterator[tuple[str, str, Any, dict[str, str], dict[str, Any], int]]:
    """What reads planes."""
    from gemworks.precision import kernel_reading as kr
    from gemworks.precision.kernel_common import FORMATS

    constants = {"ROWS": 256, "COLUMNS": 8}
    arguments = argument_types(kr.wide_scales_kernel, {"scales_ptr": "*u8", "out_ptr": "*fp32"}, constants)
    yield "wide_scales", "", kr.wide_scales_kernel, arguments, constants, 4
    for name, block_rows, block_columns in (("rows", 1, 32), ("columns", 32, 1), ("square", 32, 32)):
        constants = {
            "ROWS": 32,
            "COLUMNS": 128,
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLUMNS": block_columns,
            "FORMAT": FORMATS["e4m3"],
            "SWAP": False,
            ("stride_code_row" if name == "columns" else "stride_code_column"): 1,
        }
        kernel = kr.dequantise_kernel
        pointers = {"codes_ptr": "*u8", "scales_ptr": "*u8", "out_ptr": "*bf16"}
        yield "dequantise", name, kernel, argument_types(kernel, pointers, constants), constants, 4


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and local memory (spills, in bytes) of a cubin, as `cuobjdump` reads them."""
    import triton

    tool = next(Path(triton.__file__).parent.rglob("cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    registers = re.search(r"REG:(\d+)", text.stdout)
    stack, local = re.search(r"STACK:(\d+)", text.stdout), re.search(r"LOCAL:(\d+)", text.stdout)
    if registers is None or stack is None or local is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text.stdout!r} {text.stderr!r}")
    return int(registers[1]), int(stack[1]) + int(local[1])


def compile_one(
    function: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    num_warps: int,
    max_registers: int | None = None,
) -> Any:
    """Compile a kernel; pointers and strides are assumed 16-aligned, as the launcher's tensors are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    aligned = ("_ptr", "num_rows", "num_columns", "num_features", "stride_row", "padded_columns")
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if name in types and (name.endswith(aligned) or name in aligned)
    }
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in function.arg_names},
        constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": num_warps} | ({"maxnreg": max_registers} if max_registers is not None else {})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main(arguments: list[str]) -> int:
    """Compile for the named architecture and print a line per kernel; what spills, the lines say."""
    architecture = arguments[0] if arguments else "sm_90"
    if not re.fullmatch(r"sm_\d+", architecture):
        print(f"architecture: got {architecture!r}, expected one such as sm_90", file=sys.stderr)
        return 2
    chosen = arguments[1] if len(arguments) > 1 else ""
    for kernel, variant, function, types, constants, num_warps, limit in variants():
        if not re.search(chosen, f"{kernel} {variant}"):
            continue
        compiled = compile_one(function, types, constants, int(architecture[3:]), num_warps, limit)
        registers, spill_bytes = resources(compiled.asm["cubin"])
        ptx = compiled.asm["ptx"]
        line = {
            "kernel": kernel,
            "variant": variant,
            "registers": registers,
            "spill_bytes": spill_bytes,
            "shared_bytes": compiled.metadata.shared,
            "num_warps": num_warps,
            "hardware_cast": bool(re.search("satfinite.e(4m3|5m2)x2", ptx)),
            "ptx_lines": ptx.count("\n"),
        }
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
