"""The benchmark's plot: drawn from rows alone, no bar under the legend, no label cut off."""

from pathlib import Path

import pytest
from gemworks.precision.bench_plot import FUSED, plot
from gemworks.precision.bench_run import COMMON, LEADING

pytestmark = pytest.mark.reference


def row(**values: str) -> dict[str, str]:
    return dict.fromkeys((*LEADING, *COMMON), "") | {"gpu": "NVIDIA H200", "commit": "abc1234"} | values


ROWS = [
    row(op="cast_rows", shape="8x128", format="mxfp8", impl="gemworks", roofline_fraction="0.9"),
    row(op="cast_rows", shape="8x128", format="mxfp8", impl="torch_compile", roofline_fraction="0.2"),
    *(
        row(op="linear", shape="8x8x8", direction="fwd_bwd", format=format, impl=impl, ratio_to_bf16="1.1")
        for format, impl in (("fp8_block128", "gemworks"), ("mxfp8", "gemworks_save_both"), ("bf16", "torch"))
    ),
    *(
        row(op=op, shape="8x8x8", direction="fwd_bwd", format=format, impl=impl, ratio_to_bf16="1.1")
        for op, format, impl in FUSED
    ),
]


def test_a_plot_is_drawn_from_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    assert plot(ROWS, tmp_path / "a.png")
    (figure,) = figures
    casts, layers, fused = figure.axes
    assert sum(len(bars) for bars in casts.containers) == 1  # a peer is no cast of ours
    assert sum(len(bars) for bars in layers.containers) == 2  # the line at 1 stands for bf16
    assert sum(len(bars) for bars in fused.containers) == len(FUSED)
    for axis in figure.axes:
        assert "NVIDIA H200, commit abc1234" in axis.get_xlabel()
        legend = axis.get_legend()
        assert legend is not None
        box = legend.get_window_extent()
        assert not axis.bbox.overlaps(box)
        assert box.x1 <= figure.bbox.x1


def test_nothing_is_drawn_without_rows(tmp_path: Path):
    assert not plot([row(op="norm_cast", impl="gemworks", roofline_fraction="0.8")], tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
