"""Every kernel of the shipped table compiles for the architectures of its support row, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gemworks.jagged.ops.attention_core import table

pytestmark = pytest.mark.compile
SCRIPT = Path(__file__).parent / "compiled_attention.py"
SIGNALS = ("loose_signals", "early_expects", "device_descriptors", "idle_barriers")
SHARED_LIMIT = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}  # bytes that one block may have


def compiled(*arguments: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row["label"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("masked", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_tuned_triton_kernels_for_hopper(masked: str) -> None:
    """Tensor cores are used and next to nothing spills."""
    rows = compiled("triton", "sm_90", "bf16", "128", masked)
    assert len(rows) == 2 * len(table.STEPS)
    for label, row in rows.items():
        assert row["HGMMA"] > 0, label
        assert row["stack"] <= 16, label
        assert row["shared"] <= SHARED_LIMIT["sm_90"], label


@pytest.mark.parametrize("masked", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_biased_kernels_for_hopper(masked: str) -> None:
    rows = compiled("triton-bias", "sm_90", "bf16", "128", masked)
    assert {label.split()[0] for label in rows} == {*table.STEPS, "backward_bias"}
    for label, row in rows.items():
        assert row["HGMMA"] > 0, label
        assert row["stack"] <= 16, label
        assert row["shared"] <= SHARED_LIMIT["sm_90"], label


@pytest.mark.parametrize(
    ("backend", "shared_query", "steps"),
    [
        ("gluon-usual", "0", {"forward", "backward"}),
        pytest.param("gluon-masked", "0", {"forward", "backward"}, marks=pytest.mark.slow),
        pytest.param("gluon", "0", {*table.STEPS, "backward"}, marks=pytest.mark.slow),
        pytest.param("gluon", "1", {*table.STEPS, "backward"}, marks=pytest.mark.slow),
    ],
)
def test_gluon_kernels_for_hopper(backend: str, shared_query: str, steps: set[str]) -> None:
    """Next to nothing spills, except in the dK/dV kernel: accumulators and score tiles fill the 240 registers."""
    rows = compiled(backend, "sm_90", "bf16", "128", shared_query)
    assert {label.split()[0] for label in rows} == steps
    for label, row in rows.items():
        assert row["HGMMA"] > 0, label
        spills = 96 if backend == "gluon-masked" else 80 if label.startswith("backward_kv") else 32
        assert row["stack"] <= spills, label
        assert row["barriers"] > 0, label  # else nobody looked for idle ones
        assert not any(row[name] for name in SIGNALS), (label, row)
        assert (row["turns"] > 0) == ("in_turn=True" in label), label
        if label.startswith("backward "):  # products that wait for each other are each followed by a wait
            assert row["waits"] <= 24, label
        assert row["shared"] <= SHARED_LIMIT["sm_90"], label


@pytest.mark.parametrize("shared_query", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_backwards_that_end_in_that_of_norm_and_rotation(shared_query: str) -> None:
    """No product waits more than without; what spills are addresses before and after the walk over queries."""
    rows = compiled("norm-rope-back", "sm_90", "bf16", "128", shared_query)
    assert len(rows) == (2 if shared_query == "1" else 3)
    for label, row in rows.items():
        assert row["HGMMA"] > 0, label
        assert row["shared"] <= SHARED_LIMIT["sm_90"], label
        if label.startswith("backward_kv"):
            assert row["stack"] <= 192, label
            continue
        assert row["stack"] <= (56 if "masked" in label else 32), label
        assert row["waits"] <= 24, label
        assert row["barriers"] > 0, label
        assert not any(row[name] for name in SIGNALS), (label, row)


OTHERS = [
    ("norm-rope-back", "sm_90", "fp16", "128", "0"),
    ("norm-rope-back", "sm_90", "bf16", "64", "0"),
    ("norm-rope-back", "sm_80", "fp32", "128", "0"),
    ("norm-rope-back", "sm_100", "bf16", "128", "0"),
    *(("triton", "sm_90", dtype, width, "1") for dtype in ("bf16", "fp32") for width in ("32", "64", "256")),
    ("triton", "sm_90", "fp32", "128", "1"),
    *(("triton", place, dtype, width, "0") for place in ("sm_80", "sm_100") for dtype, width in (("bf16", "128"),)),
    *(("triton", place, dtype, width, "1") for place in ("sm_80", "sm_100") for dtype, width in (("fp32", "256"),)),
    ("triton", "sm_80", "bf16", "256", "1"),
    ("triton-bias", "sm_90", "fp32", "128", "1"),
    ("triton-bias", "sm_100", "bf16", "256", "1"),
    ("gluon", "sm_90", "fp16", "128", "0"),
    ("gluon", "sm_90", "bf16", "64", "0"),
    ("gluon-activations", "sm_90", "bf16", "128", "0"),
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", OTHERS, ids=" ".join)
def test_the_rest_of_the_table(arguments: tuple[str, ...]) -> None:
    rows = compiled(*arguments)
    assert rows
    for label, row in rows.items():
        assert row["HGMMA"] + row["HMMA"] + row["UTCHMMA"] > 0, label
        assert row["shared"] <= SHARED_LIMIT[arguments[1]], label


SPECIALISE = Path(__file__).parents[1] / "tools/warp_specialize.py"


def specialise() -> Any:
    spec = importlib.util.spec_from_file_location("jagged_warp_specialize", SPECIALISE)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_what_the_compiler_specialises_is_counted() -> None:
    """A kernel with descriptors is specialised; the words of a compiler that fails are kept, without its folders."""
    case = ("descriptors", "specialised", "64", "4")
    command = [sys.executable, str(SPECIALISE), "--case", *case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "warp-specialised regions: 1," in done.stdout, done.stderr[-2000:]
    tool = specialise()
    assert case in tool.CASES
    said = "note\npython3: /a-b/c/Pass.cpp:7: void f(): Assertion `x' failed.\n/d/e.py:1:0: error: pipeline\n"
    assert tool.reason(said) == "Pass.cpp:7: void f(): Assertion `x' failed."
    assert tool.reason("/d/warp_specialize.py:1:0: error: no pipeline") == "error: no pipeline"


def test_the_shipped_kernel_is_rewritten_as_it_is_asked(tmp_path: Path) -> None:
    tool = specialise()
    for how in ("as-it-is", "specialised", "no-return"):
        text = tool.shipped(how, tmp_path).src
        assert ("warp_specialize=True" in text) is (how != "as-it-is")
        assert ("num_tiles):" in text) is (how != "no-return")
