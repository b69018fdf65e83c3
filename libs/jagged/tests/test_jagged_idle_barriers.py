"""The search for idle barriers (compiled_signals.py) finds one in the intermediate code of a kernel that has one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.reference

RING = """\
    %q_smem = ttg.local_alloc : () -> !ttg.memdesc<4x64x128xbf16, #shared1, #smem, mutable> loc(#loc1)
    %k_free = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared2, #smem, mutable> loc(#loc2)
    %v_free = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared2, #smem, mutable> loc(#loc3)
    %barriers = ttg.memdesc_index %k_free[%c0_i32] : !ttg.memdesc<2x1xi64, #shared2> -> !ttg.memdesc<1xi64, #shared2>
    ttng.init_barrier %barriers, 3 : !ttg.memdesc<1xi64, #shared2, #smem, mutable> loc(#loc4)
    %barriers_1 = ttg.memdesc_index %v_free[%c0_i32] : !ttg.memdesc<2x1xi64, #shared2> -> !ttg.memdesc<1xi64, #shared2>
    ttng.init_barrier %barriers_1, 3 : !ttg.memdesc<1xi64, #shared2, #smem, mutable> loc(#loc4)
"""
ENDED = "    ttng.inval_barrier %barriers : !ttg.memdesc<1xi64, #shared2, #smem, mutable> loc(#loc5)\n"
ENDED_TOO = ENDED.replace("%barriers", "%barriers_1")


def warps(*names: str) -> str:
    return f"    ttg.warp_specialize({', '.join(names)}) attributes {{warpGroupStartIds = array<i32: 4, 8>}}\n"


@pytest.fixture(scope="module")
def signals() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "jagged_compiled_signals", Path(__file__).with_name("compiled_signals.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("rest", "idle"),
    [
        (warps("%q_smem", "%k_free"), 1),  # the forward's fault: v's barriers are made, no warp has them
        (warps("%q_smem", "%k_free", "%v_free"), 0),
        (warps("%q_smem", "%k_free") + ENDED_TOO, 0),
        (warps("%q_smem", "%k_free") + ENDED, 1),  # another barrier was ended
        ("", 2),
        (ENDED, 1),
        (ENDED + ENDED_TOO, 0),
    ],
)
def test_a_barrier_that_nobody_has_or_ends_is_found(signals: ModuleType, rest: str, idle: int) -> None:
    assert signals.barriers(RING + rest) == ["%k_free", "%v_free"]
    assert signals.idle_barriers(RING + rest) == idle


def test_a_kernel_without_barriers_has_no_idle_one(signals: ModuleType) -> None:
    text = RING.splitlines()[0] + "\n" + warps("%q_smem")
    assert signals.barriers(text) == []
    assert signals.idle_barriers(text) == 0
