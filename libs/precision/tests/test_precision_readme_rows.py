"""The README's tables of measurements: every cell is the row of its commit in docs/measured."""

import csv
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.reference
PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text(encoding="utf-8")
MAIN, ONE_SCALE, IN_TURNS = (
    f"precision_{name}.csv" for name in ("h200", "one_scale_h200", "attention_in_turns_h200")
)  # fmt: skip
BLOCKS = "fp8_block128"
OURS = [(BLOCKS, f"gemworks{way}") for way in ("", "_save_both", "_squares", "_square_inputs", "_wgrad_bf16")]
TENSOR, TENSOR_E4M3 = ("fp8_tensor", "gemworks_save_both"), ("fp8_tensor", "gemworks_e4m3")
BLOCK_SCALING, CURRENT_SCALING = ("block_scaling", "transformer_engine"), ("current_scaling", "transformer_engine")
# the columns of each table of layers by its header's second cell: op, and what implementations a cell is the best of
LAYERS = {
    "aim": (MAIN, "4999828", [None, *(("linear", of) for of in (
        OURS[:2], OURS[2:3], OURS[3:4], OURS[4:], [("mxfp8_regroup128", "gemworks")],
        [("mxfp8", "gemworks_save_both")]))]),
    "ours, fastest": (MAIN, "4999828", [("linear", of) for of in (
        OURS, OURS[:2], [BLOCK_SCALING], [CURRENT_SCALING])]),
    "`fp8_tensor`": (ONE_SCALE, "a4df708", [*(("linear", of) for of in (
        [TENSOR], [CURRENT_SCALING], [TENSOR_E4M3], OURS)), None]),
    "casts by themselves": (MAIN, "a4df708", [
        *(("linear_fused", [(BLOCKS, f"gemworks_{way}")]) for way in (
            "unfused", "norm", "norm_and_gradient", "norm_and_gradient_wgrad_bf16")),
        *(("mlp", [(BLOCKS, impl)]) for impl in ("gemworks_unfused", "gemworks"))]),
}  # fmt: skip


def rows(file: str, **of: str) -> list[dict[str, str]]:
    """The rows of a CSV with these values."""
    with (PACKAGE.parents[1] / "docs/measured" / file).open(newline="", encoding="utf-8") as lines:
        return [row for row in csv.DictReader(lines) if all(row[name] == value for name, value in of.items())]


def table(second: str) -> list[list[str]]:
    """The cells of the one table whose header's second cell is this, without its header."""
    tables = [[[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
              for block in re.findall(r"(?:^\|.*\n)+", README, re.M)]  # fmt: skip
    (found,) = (t for t in tables if t[0][1] == second)
    return found[2:]


def numbers(cell: str) -> list[str]:
    return re.findall(r"\d+\.\d+", cell)


def two_digits(value: float) -> str:
    """Halves up, as in the page."""
    return f"{value + 1e-9:.2f}"


@pytest.mark.parametrize("second", LAYERS)
def test_layers(second: str):
    file, commit, columns = LAYERS[second]
    compared = 0
    for shape, *cells in table(second):
        shape = re.sub(r"[^\dx]", "", shape)
        assert len(cells) == len(columns)
        for cell, column in zip(cells, columns, strict=True):
            if column is None:
                continue
            op, ways = column
            found = [
                float(row["ratio_to_bf16"])
                for row in rows(file, op=op, shape=shape, direction="fwd_bwd", commit=commit)
                if (row["format"], row["impl"]) in ways
            ]
            assert numbers(cell) == [two_digits(max(found))] if found else not cell, (shape, column)
            compared += bool(found)
    assert compared >= 16


def test_signal_to_noise_of_one_scale_a_tensor():
    for shape, *_, cell in table("`fp8_tensor`"):
        found = [
            f"{float(row['sqnr_db']):.1f}"
            for format, impl in (TENSOR, TENSOR_E4M3, CURRENT_SCALING)
            for row in rows(ONE_SCALE, shape=shape.replace(" ", ""), format=format, impl=impl, direction="fwd")
        ]
        assert numbers(cell) == found


@pytest.mark.parametrize(("line", "file", "commit"), [(0, IN_TURNS, "41a1106"), (1, MAIN, "a4df708")])
def test_attention(line: int, file: str, commit: str):
    name, *cells = table("bf16 forward, ms")[line]
    assert f"{file}), {commit})" in name
    found = {
        (row["direction"], row["format"], row["impl"]): row for row in rows(file, op="attention_fp8", commit=commit)
    }
    assert cells == [
        f"{float(found['fwd', 'bf16', 'gemworks_bf16']['ms']):.3f}",
        two_digits(float(found["fwd", "tiles", "gemworks"]["ratio_to_bf16"])),
        two_digits(float(found["fwd", "tiles", "gemworks_with_casts"]["ratio_to_bf16"])),
        f"{float(found['fwd_bwd', 'bf16', 'gemworks_bf16']['ms']):.2f}",
        two_digits(float(found["fwd_bwd", "tiles", "gemworks_with_casts"]["ratio_to_bf16"])),
    ]


def test_casts():
    for format, *cells in table("rows"):
        for cell, op in zip(cells, ("rows", "columns", "both", "square"), strict=True):
            (row,) = rows(
                MAIN, op=f"cast_{op}", shape="262144x1024", format=format.strip("`"), impl="gemworks",
                commit="a4df708",
            )  # fmt: skip
            assert cell == two_digits(float(row["roofline_fraction"]))


def test_fused_casts():
    for format, norms, gelu in table("residual + RMSNorm, K 512 / 1024 / 4096"):
        for op, cell in (("norm_cast", norms), ("gelu_cast", gelu)):
            found = rows(MAIN, op=op, format=format.strip("`"), impl="gemworks", commit="a4df708")
            assert numbers(cell) == [two_digits(float(row["roofline_fraction"])) for row in found]
