"""Tiers that need a process of their own: the interpreted kernels, and the kernels compiled for a GPU that is not
there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from gemworks.netmem import kernel_codec as k

for mx, block in ((True, 32), (False, 128), (False, 512), (False, 500)):
    for kernel in (k.encode_kernel, k.decode_kernel):
        padded = triton.next_power_of_2(block)
        constants = dict(BLOCK=block, P=padded, R=k.TILE // padded, MX=mx, MASK=0 if block != 500 else 2)
        if kernel is k.encode_kernel:
            constants["HARDWARE"] = True
        types = dict(x_ptr="*bf16", out_ptr="*bf16", codes_ptr="*u8", scales_ptr="*u8" if mx else "*fp32")
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
        # as the launcher sees aligned tensors whose size is a multiple of 16
        aligned = [i for i, n in enumerate(kernel.arg_names) if n.endswith("_ptr") or n == "numel"]
        attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
        built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": k.NUM_WARPS})
        ptx = built.asm["ptx"]
        if kernel is k.encode_kernel:
            assert "cvt.rn.satfinite.e4m3x2.f32" in ptx, "codes are not rounded by the hardware"
        assert ".local" not in ptx, (kernel.fn.__name__, block)
        if block != 500:
            assert ".v4.b32" in ptx, f"no 16-byte access: {kernel.fn.__name__} {block}"
        print("ok")

for kernel, constants in (
    (k.decode_sum_kernel, dict(W=2, BLOCK=512, P=512, R=8, MASK=0, MX=False, MEAN=False)),
    (k.decode_sum_kernel, dict(W=8, BLOCK=32, P=32, R=128, MASK=1, MX=True, MEAN=True)),
    (k.sum_kernel, dict(W=2, RANK=1, MEAN=False, TILE_=k.TILE)),
    (k.sum_kernel, dict(W=8, RANK=3, MEAN=True, TILE_=k.TILE)),
):
    types = dict(codes_ptr="*u8", scales_ptr="*u8" if constants.get("MX") else "*fp32")
    types = {n: types.get(n, "*bf16" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}
    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    aligned = [i for i, n in enumerate(kernel.arg_names) if n not in constants and n != "num_blocks"]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": k.NUM_WARPS}).asm["ptx"]
    assert ".local" not in ptx, kernel.fn.__name__
    assert ".v4.b32" in ptx, f"no 16-byte access: {kernel.fn.__name__}"
    print("ok")
"""


@pytest.mark.interpret
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process runs them itself")
def test_interpreted_kernels_equal_the_definition():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    file = str(HERE / "test_netmem_codec_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=HERE.parents[2])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


@pytest.mark.compile
def test_kernels_compile_for_sm_90_with_wide_accesses():
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("ok") == 12
