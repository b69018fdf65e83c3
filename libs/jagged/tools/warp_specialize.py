"""What Triton's compiler makes of attention whose loop asks for warp specialisation, for sm_90; needs no GPU.

    python libs/jagged/tools/warp_specialize.py >> docs/measured/jagged_warp_specialize_compile.txt

First the plain forward kernel, in four and in eight warps, as it is and with `tl.range(..., warp_specialize=True)`
in its loop over keys, with and without its early return; then a small one whose loads go through descriptors of ragged
tensors. A compiler that aborts takes its process along, so each is compiled in one of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from gemworks.jagged.ops.attention_core import kernel_forward, table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
WIDTH = 128
LOOP = "for n in range(begin, end, BN):"
RETURN = "    if tile >= tl.load(num_tiles):\n        return\n"
POINTERS = {"lse": "*fp32"} | dict.fromkeys(("bounds_q", "bounds_k", "tile_sample", "tile_row", "num_tiles"), "*i32")
KINDS = POINTERS | dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"scale": "fp32"}
ABSENT = ("position", "time", "times_q", "times_k")
OPTIONS = {
    **{"MASKED": False, "BOTTOM_RIGHT": True, "SHARED": False, "HEADS": 4, "GROUP": 1, "H": WIDTH, "V": WIDTH},
    **{"BH": WIDTH, "BV": WIDTH, "PRECISION": "tf32", "BY_POSITION": False, "BUCKETS": 0},
}
CASES = (
    *itertools.product(("shipped",), ("as-it-is", "specialised", "no-return"), ("softmax", "fast_gelu"), ("4", "8")),
    *itertools.product(("descriptors",), ("as-it-is", "specialised"), ("64", "128"), ("4",)),
)


@triton.jit
def ragged_kernel(
    q, k, v, out, bounds, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPECIALISED: tl.constexpr
):  # fmt: skip
    """One head, relu for the activation; q, k, v are descriptors whose boxes end where their sequence does."""
    sample = tl.program_id(1)
    begin = tl.load(bounds + sample)
    length = tl.load(bounds + sample + 1) - begin
    first = tl.program_id(0) * BM
    back = (1 << 30) - length
    q_MH = q.load([begin + length, 1 << 30, back + first, 0, 0]).reshape([BM, H])
    o_MH = tl.zeros([BM, H], tl.float32)
    for n in tl.range(0, length, BN, warp_specialize=SPECIALISED):
        k_nH = k.load([begin + length, 1 << 30, back + n, 0, 0]).reshape([BN, H])
        p_Mn = tl.maximum(tl.dot(q_MH, k_nH.T), 0.0)
        v_nH = v.load([begin + length, 1 << 30, back + n, 0, 0]).reshape([BN, H])
        o_MH = tl.dot(p_Mn.to(tl.bfloat16), v_nH, o_MH)
    r = first + tl.arange(0, BM)
    at = out + (begin + r)[:, None] * H + tl.arange(0, H)[None, :]
    tl.store(at, o_MH.to(tl.bfloat16), mask=(r < length)[:, None])


def shipped(how: str, folder: Path) -> Any:
    """The shipped kernel, rewritten as `how` says in a file of its own: Triton compiles what it reads in a file."""
    path = kernel_forward.__file__
    assert path is not None
    text = Path(path).read_text()
    changes = {} if how == "as-it-is" else {LOOP: "for n in tl.range(begin, end, BN, warp_specialize=True):"}
    if how == "no-return":  # specialised too
        changes[RETURN] = ""
    for old, new in changes.items():
        assert text.count(old) == 1, f"the kernel has no longer one {old!r}"
        text = text.replace(old, new)
    written = folder / "kernel.py"
    written.write_text(text)
    spec = importlib.util.spec_from_file_location("rewritten_kernel", written)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.forward_kernel


def compiled(kind: str, how: str, what: str, warps: int, folder: Path) -> Any:
    """`what`: the activation of the shipped kernel, the rows of a tile of the other one."""
    if kind == "shipped":
        kernel = shipped(how, folder)
        config = table.triton_config(
            "forward", table.Shape(what, torch.bfloat16, WIDTH, WIDTH, False, False, False, 1024)
        )
        constants = OPTIONS | {"ACT": what, "BM": config.block_m, "BN": config.block_n} | dict.fromkeys(ABSENT)
        kinds, stages = KINDS, config.num_stages
    else:
        kernel, rows, stages = ragged_kernel, int(what), 2
        constants = {"H": WIDTH, "BM": rows, "BN": 64, "SPECIALISED": how == "specialised"}
        boxes = {"q": rows, "k": 64, "v": 64}
        kinds = {n: f"tensordesc<bf16[1,1,{r},1,{WIDTH}]>" for n, r in boxes.items()} | {
            "out": "*bf16",
            "bounds": "*i32",
        }
    names = list(kernel.arg_names)
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*" or n.endswith("_st")
    }
    source = ASTSource(kernel, signature, {(names.index(n),): x for n, x in constants.items()}, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=TARGET, options=options)


def reason(output: str) -> str:
    """The first of the compiler's own words that says why, without folders."""
    said = re.findall(r"^.*(?:Assertion .* failed|UNREACHABLE|error:|LLVM ERROR).*$", output, re.MULTILINE)
    text = said[0] if said else next(iter(output.strip().splitlines()[-1:]), "no word")
    text = re.sub(r"(?:/[\w.+-]+)+/", "", text)
    return re.sub(rf"^(?:python\S*: |{Path(__file__).name}:\d+:\d+: )", "", text)


def try_out(case: Sequence[str]) -> str:
    done = subprocess.run([sys.executable, __file__, "--case", *case], capture_output=True, text=True, timeout=300)
    if done.returncode == 0:
        return done.stdout.strip()
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return f"fails, {ended}: {reason(done.stderr + done.stdout)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=4, help="this one, in this process", metavar=("KERNEL", "HOW", "WHAT", "WARPS"))
    case = parser.parse_args().case
    if case is None:
        print(f"triton {triton.__version__}, sm_90, bf16, heads of {WIDTH}")
        for each in CASES:
            print(f"{' '.join(each)} warps: {try_out(each)}", flush=True)
        return
    kind, how, what, warps = case
    with tempfile.TemporaryDirectory() as folder:
        asm = compiled(kind, how, what, int(warps), Path(folder)).asm
    regions = asm["ttgir"].count("ttg.warp_specialize(")
    registers, products = (asm["ptx"].count(word) for word in ("setmaxnreg", "wgmma.mma_async"))
    print(f"compiles, warp-specialised regions: {regions}, setmaxnreg: {registers}, wgmma: {products}")


if __name__ == "__main__":
    main()
