"""The benchmark's plots: every bar has a place of its own, and the legend covers none."""

import itertools
from pathlib import Path

import pytest
from gemworks.jagged.bench.plots import BAR_INCHES, COLORS, EXECUTED, bar_slots, executed, plots, provenance
from gemworks.jagged.bench.report import COLUMNS, OURS, Row

pytestmark = pytest.mark.reference


def row(op: str, shape: str, impl: str, direction: str = "fwd", tflops: str = "100") -> Row:
    filled = {"op": op, "shape": shape, "impl": impl, "direction": direction, "tflops": tflops}
    rest = {"law": "uniform", "head_dim": "128", "dtype": "bfloat16", "gpu": "NVIDIA H200", "commit": "abc1234"}
    return dict.fromkeys(COLUMNS, "") | rest | filled


ROWS = [
    row("flash_attention", "B8 max64", "flash-attn-4"),
    row("flash_attention", "B8 max64", OURS),
    row("flash_attention", "B8 max64", OURS, "bwd"),
    row("gdpa", "B8 max64", OURS),
    *(row("gdpa", f"B256 max{n}", impl) for n in (256, 1024, 4096) for impl in (OURS, "flash-attn-4")),
    row("gdpa", "B256 max1024", "FlexAttention"),
]


def test_bars_do_not_overlap_and_ours_come_first():
    slots = list(bar_slots(ROWS))
    assert [name for case, name, _ in slots if "flash_attention" in case] == [OURS, "flash-attn-4"]
    places = [at for _, _, at in slots]
    assert min(b - a for a, b in itertools.pairwise(places)) >= BAR_INCHES - 1e-9
    assert len(slots) == 10  # a case takes room for what has rows


def test_a_plot_says_where_its_rows_come_from():
    assert provenance(ROWS) == "NVIDIA H200, bfloat16, commit abc1234"
    assert provenance([row("gdpa", "B8 max64", OURS) | {"gpu": ""}]) == "CPU, bfloat16, commit abc1234"


def test_names_of_one_plot_have_different_colours():
    bars = [color for name, color in COLORS.items() if name not in ("flash_attention", "gdpa")]
    assert len(bars) == len(set(bars))


def test_what_is_computed_twice_is_drawn_behind_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    split = [r | {"direction": "bwd", "executed_tflops": "140"} for r in ROWS if r["impl"] == OURS]
    plots(tmp_path / "a.png", [*ROWS, *split])
    for figure in figures:
        assert any(EXECUTED in text.get_text() for text in figure.legends[0].get_texts())
    behind = 0
    for axis in figures[0].axes:
        bars = {str(bar.get_label()): bar for bar in axis.containers if isinstance(bar, BarContainer)}
        for wide in bars.get(EXECUTED, ()):
            assert wide.get_width() == 140
            (useful,) = [bar for bar in bars[OURS] if bar.get_y() == wide.get_y()]
            assert useful.get_width() == 100
            assert wide.get_zorder() < useful.get_zorder()
            behind += 1
    assert behind == len({(r["op"], r["shape"]) for r in split})
    assert executed(split[0]) == 140
    assert executed(split[0] | {"executed_tflops": "100"}) is None
    assert executed({k: v for k, v in split[0].items() if k != "executed_tflops"}) is None


def test_plots_are_drawn_from_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    assert plots(tmp_path / "a.png", ROWS) == f"plots: {tmp_path / 'a.png'}, {tmp_path / 'a.sweep.png'}"
    for figure in figures:
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert not any(axis.bbox.overlaps(box) for axis in figure.axes)
    swept = {text.get_text() for text in figures[1].legends[0].get_texts()}
    assert swept == {f"{n}, {d}" for n in ("gdpa", "flash-attn-4") for d in ("forward", "backward")}
    assert plots(tmp_path / "b.png", [row("rms_norm", "8x8", OURS, tflops="")]) == "no plot: no row has a rate"
