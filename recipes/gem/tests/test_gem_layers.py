"""Layers alone: what is timed is the model's own layer, its FLOPs are the counter's, and sums say what they claim."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gemworks.gem.data import open_source
from gemworks.gem.efficiency import H200_BF16_PEAK_FLOPS, count_flops
from gemworks.gem.layers.__main__ import LAYERS, draw_lengths, main, measure
from gemworks.gem.layers.parts import Part, linear_product, make_parts
from gemworks.gem.layers.report import COLUMNS, Measured, chart, rows_of, total_of, worst
from gemworks.gem.layers.timing import Bound, Time, is_product, split_kernels
from gemworks.gem.presets import load_config
from gemworks.jagged.bench.timing import Ceilings
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.reference
CPU = torch.device("cpu")


def time_of(ms: float) -> Time:
    return Time(ms, ms, ms)


def test_local_mfu_of_a_known_case():
    """Two layers at half the peak and one without FLOPs that takes as long as both: a quarter of the peak."""
    flops = 0.5 * H200_BF16_PEAK_FLOPS * 2e-3  # half of the peak for 2 ms
    layers = [
        Measured("product", 2, flops, True, time_of(2.0), None, 1.0),
        Measured("norm", 1, 0.0, True, time_of(4.0), None, 0.0),
        Measured("inside", 0, 3 * flops, True, time_of(1.0), None, 0.5),  # so that no count can stand for another
        Measured("missing", 3, flops, True, None, None, 0.0, "why"),
    ]
    total = total_of(layers, sequence_only=True)
    assert total.local_mfu == pytest.approx(0.25)
    assert total.bound_mfu == pytest.approx(1.0)  # 2 x 1 ms is what the peak needs
    assert [x.name for x in worst(layers)] == ["norm", "product"]
    rows = {row["layer"]: row for row in rows_of(layers, {"attention": "block"})}
    assert rows["missing"]["note"] == "why"
    assert rows["missing"]["ms"] == ""
    assert rows["inside"]["share_of_time"] == ""
    assert float(rows["norm"]["share_of_time"]) == pytest.approx(0.5)


def test_some_layers_are_no_whole_model():
    layers = [
        Measured("hsp", 2, 1e12, True, time_of(2.0), None, 1.0),
        Measured("head", 1, 1e9, False, time_of(4.0), None, 0.1),
    ]
    totals = [[row["layer"] for row in rows_of(layers, {}, whole_model=whole)][2:] for whole in (True, False)]
    assert totals == [["sequence layers", "whole model"], ["sequence layers"]]


def test_l3_nothing_exceeds_its_bound():
    """L3: layers that run at their least time have the bound's MFU, and no more."""
    x = Measured("x", 1, H200_BF16_PEAK_FLOPS * 1e-3, True, time_of(1.0), None, 1.0)
    total = total_of([x], sequence_only=False)
    assert total.local_mfu == pytest.approx(total.bound_mfu) == pytest.approx(1.0)


def test_a_trace_is_split_without_counting_overlap_twice():
    split = split_kernels(
        [("nvjet_tst_128", 0.0, 1000.0), ("triton_poi_fused_add", 500.0, 1500.0), ("norm_fwd_kernel", 2000.0, 2500.0)],
        1,
    )
    assert (split.tensor_core_ms, split.memory_ms, split.gap_ms) == (1.0, 1.0, 0.5)
    assert split.kernels[0] == ("nvjet_tst_128", 1.0, 1.0)
    assert split_kernels([], 1).gap_ms == 0.0


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("backward_hopper_kernel", True),
        ("block_fwd_kernel", True),
        ("void pytorch_flash::flash_bwd_kernel<...>", True),
        ("norm_bwd_kernel", False),
        ("norm_rope_kernel", False),
        ("triton_red_fused__fused_rms_norm_backward_attention_backward_view_0", False),
        ("cublasLt::splitKreduce_kernel", False),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, product: bool):
    assert is_product(name) == product


@pytest.mark.parametrize("attention", ["block", "full"])
def test_parts_have_all_flops_of_the_model(attention: str):
    """Every part of the counter is in exactly one timed part, and a timed part does what it is counted for."""
    config = load_config("tiny", sets=["data.batch_size=4", f"model.attention={attention}", "train.dtype=float32"])
    schema = open_source(config.data).schema
    full = {event.name: torch.full((4,), 64) for event in schema.events}
    counted = count_flops(config, schema, full)
    total = 0.0
    for part in make_parts(config, schema, full, CPU):
        total += part.count * part.flops
        if part.forward is None:
            assert part.flops == 0.0
            assert part.refusal
            continue
        with FlopCounterMode(display=False) as counter:
            part.forward()
        assert 3.0 * counter.get_total_flops() == pytest.approx(part.flops, rel=1e-6), part.name
    assert total == pytest.approx(counted.training, rel=1e-9)


def test_products_of_a_part_have_its_flops():
    """What the bound is computed from is what is counted, for the sequence layers."""
    config = load_config("tiny", sets=["data.batch_size=4", "train.dtype=float32"])
    schema = open_source(config.data).schema
    lengths = {event.name: torch.tensor([64, 3, 0, 40]) for event in schema.events}
    for part in make_parts(config, schema, lengths, CPU):
        if part.is_sequence and part.products:
            assert 3.0 * sum(p.flops for p in part.products) == pytest.approx(part.flops, rel=1e-6), part.name


def test_bound_takes_the_slower_of_products_and_traffic():
    bound = Bound(copy_gbps=10.0, tflops=1.0, device=CPU)
    product = linear_product(1000, 1000, 1000)
    assert bound._ms(product) == pytest.approx(3 * 2.0)  # 2 GFLOP at 1 TFLOP/s beside 6 MB at 10 GB/s, three times
    thin = linear_product(1000, 1, 1000)
    assert bound._ms(thin) == pytest.approx(3 * thin.forward_bytes / 1e7)


def test_a_layer_that_cannot_run_says_why():
    """`varlen_attn` has no CPU kernel: the rows stay, with the reason."""
    config = load_config("tiny", sets=["data.batch_size=4", "train.dtype=float32"])
    config = config.with_kernels(attention="varlen", pooling="varlen")
    layers = measure(config, CPU, Ceilings(1.0, 1.0, None), repeats=1, only=("attention",))
    assert {x.name for x in layers if x.count} == {"type_0.attention", "type_1.attention"}
    assert all(x.time is None and "Error" in x.note for x in layers)


def test_a_layer_whose_answer_is_not_finite_gets_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken(*args: object) -> list[Part]:
        part = next(p for p in make_parts(*args) if p.name == "experts")  # pyright: ignore[reportArgumentType]
        return [part, replace(part, name="broken", forward=lambda: part.forward() * math.nan)]  # pyright: ignore[reportOptionalCall, reportOperatorIssue]

    monkeypatch.setattr("gemworks.gem.layers.__main__.make_parts", broken)
    assert main(["--smoke", "--attention", "block", "--setting", "norms", "--out", str(tmp_path)]) == 1
    with (tmp_path / "layers_h200.csv").open(newline="") as file:
        rows = {row["layer"]: row for row in csv.DictReader(file)}
    assert float(rows["experts"]["ms"]) > 0
    assert (rows["broken"]["ms"], rows["broken"]["note"]) == ("", "WrongAnswer: its output or a gradient is not finite")


def test_command_writes_rows_and_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["--smoke", "--attention", "block", "--setting", "norms", "--out", str(tmp_path)]
    assert main(command) == 0
    assert "worst: " in capsys.readouterr().out
    with (tmp_path / "layers_h200.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    names = {row["layer"] for row in rows}
    assert {"type_0.pffn", "type_0.hsp", "type_0.attention", "experts", "summary", "head", "whole model"} <= names
    assert {"type_0.norm/rms", "type_0.hsp/core", "embeddings"} <= names
    assert all(row["note"] for row in rows if not row["ms"])
    (picture,) = tmp_path.glob("layers_block_norms_b*.png")  # a batch size is a run of its own, with its own picture
    assert picture.stat().st_size > 10_000


def test_a_bar_ends_at_the_measured_time_and_the_legend_covers_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    empty = dict.fromkeys(COLUMNS, "") | {"attention": "full", "setting": "norms", "batch": "8", "gpu": "NVIDIA H200"}
    rows = [
        empty | {"layer": "hsp", "count": "8", "ms": "5", "tensor_core_ms": "4", "memory_ms": "2", "local_mfu": "0.4"},
        empty | {"layer": "head", "count": "1", "ms": "3", "tensor_core_ms": "0", "memory_ms": "1", "local_mfu": "0"},
        empty | {"layer": "sequence layers", "count": "1", "ms": "40", "local_mfu": "0.4"},
    ]
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    assert chart(tmp_path / "full.png", rows)
    axes = figures[0].axes[0]
    ends = [max(bar.get_x() + bar.get_width() for bars in axes.containers for bar in [bars[i]]) for i in range(2)]
    assert ends == pytest.approx([40.0, 3.0])
    assert not axes.bbox.overlaps(figures[0].legends[0].get_window_extent())
    assert max(text.get_window_extent().x1 for text in axes.texts) < axes.bbox.x1
    assert not chart(tmp_path / "none.png", [row | {"ms": ""} for row in rows])


@pytest.mark.parametrize("num_types", [1, 2])
def test_every_layer_can_be_asked_for_alone_and_nothing_else(num_types: int, capsys: pytest.CaptureFixture[str]):
    sets = ["data.batch_size=2", "train.dtype=float32", "data.max_length=8", f"data.num_event_types={num_types}"]
    config = load_config("tiny", sets=[*sets, f"model.num_event_types={num_types}"])
    schema = open_source(config.data).schema
    lengths = {event.name: torch.full((2,), 8) for event in schema.events}
    names = {part.name.split(".")[-1].split("/")[0] for part in make_parts(config, schema, lengths, CPU)}
    assert names == set(LAYERS)
    with pytest.raises(SystemExit):
        main(["--smoke", "--only", "atention"])
    assert "argument --only: invalid choice: 'atention'" in capsys.readouterr().err


def test_lengths_follow_the_law():
    config = load_config("tiny", sets=["data.batch_size=2000", "data.length_law=uniform_0.7"])
    lengths_B = draw_lengths(config, 0)
    assert int(lengths_B.min()) >= 26
    assert float(lengths_B.double().mean()) / 64 == pytest.approx(0.7, abs=0.02)
    assert torch.equal(lengths_B, draw_lengths(config, 0))


def test_a_late_residual_is_counted_once():
    """As one graph a layer adds what the one before it left, and leaves its own; alone, self-attention adds its own."""
    config = load_config("tiny", sets=["data.batch_size=4", "train.dtype=float32", "kernels.late_residual=true"])
    schema = open_source(config.data).schema
    lengths = {event.name: torch.full((4,), 64) for event in schema.events}
    parts = {part.name: part for part in make_parts(config, schema, lengths, CPU)}
    name = schema.events[0].name
    layer, attention = parts[f"{name}.layer"], parts[f"{name}.attention"]
    assert layer.forward is not None
    assert attention.forward is not None
    tokens, _, late = layer.forward()
    assert tokens.shape == late.shape
    assert attention.leaves[0].shape == tokens.shape
    assert isinstance(attention.forward(), torch.Tensor)
    leaves = layer.leaves[:2]  # the tokens, and what is to be added to them: their gradient is the sum's
    own, added = torch.autograd.grad((tokens, late), leaves, (torch.ones_like(tokens), torch.ones_like(late)))
    assert torch.equal(own, added)
