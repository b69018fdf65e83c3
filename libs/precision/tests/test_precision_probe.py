# Gradients are Optional and submodules are Tensor | Module to the checker; a wrong one fails the test anyway.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportOptionalSubscript=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
"""Probe, monitor, codec and the guard before a checkpoint."""

import math

import pytest
import torch
from gemworks.precision import PrecisionCostWarning, convert, quantize, recipe
from gemworks.precision.codec import MXCodec, MXContext
from gemworks.precision.guard import NonFiniteError, check_before_checkpoint, non_finite
from gemworks.precision.monitor import PrecisionMonitor
from gemworks.precision.probe import CANDIDATES, Candidate, ProductReport, probe, saturation_underflow, sqnr_db
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.reference


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), nn.Linear(128, 16))


def test_probe_measures_decides_and_writes_what_convert_reads(tmp_path):
    model = net()
    report = probe(model, [torch.randn(64, 128) for _ in range(2)])
    assert [layer.name for layer in report.layers] == ["0", "2", "3"]
    assert [layer.decision for layer in report.layers] == ["mxfp8", "mxfp8", "bf16"]
    assert "not a multiple of 32" in report.layers[2].reason
    for layer in report.layers[:2]:
        assert [c.preset for c in layer.candidates] == list(CANDIDATES)
        # A weight gradient that is not quantised is nearly exact.
        exact = {"fp8_wgrad_bf16"}
        assert all(24 < p.sqnr_db < (170 if c.preset in exact else 45) for c in layer.candidates for p in c.products)
    assert all(p.grad is None for p in model.parameters())
    report.save_file(tmp_path / "recipe.toml")
    assert convert(model, tmp_path / "recipe.toml").converted == ("0", "2")
    assert {row["product"] for row in report.rows()} == {"forward", "dgrad", "wgrad"}
    assert "dB" in str(report)


def test_probe_measures_a_layer_that_runs_twice():
    layer = nn.Linear(128, 128)
    report = probe(layer, [torch.randn(8, 128)], lambda m, x: m(m(x)).square().mean(), candidates=("mxfp8",))
    assert [(row.shape, row.decision) for row in report.layers] == [((8, 128, 128), "mxfp8")]


def test_probe_pairs_each_call_with_its_own_gradient():
    """A call without a backward after the one that has it, as a metric's: its input belongs to no gradient."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model(x[:3])
        return loss

    assert probe(nn.Linear(128, 128), [torch.randn(8, 128)], step, candidates=("mxfp8",)).layers[0].shape[0] == 8


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_probe_measures_layers_that_a_checkpoint_recomputes(use_reentrant):
    model = net()

    def step(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(model[:3], x.requires_grad_(), use_reentrant=use_reentrant)
        return model[3](y).square().mean()

    x = torch.randn(64, 128)
    plain = probe(model, [x])
    assert [row.decision for row in plain.layers] == ["mxfp8", "mxfp8", "bf16"]
    assert probe(model, [x], step).rows() == plain.rows()


def test_probe_takes_a_dataset_that_knows_items_alone():
    class Items:
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 2:
                raise IndexError
            return torch.randn(4 + index, 128)

    assert probe(net(), Items(), candidates=("mxfp8",)).layers[0].shape[0] == 5


def test_probe_refuses_formats_that_are_not_good_enough():
    report = probe(net(), [torch.randn(64, 128)], min_sqnr_db=60.0)
    assert {layer.decision for layer in report.layers} == {"bf16"}
    assert "dB < 60.0" in report.layers[0].reason
    x = torch.randn(64, 128)
    x[:, :32] *= 2.0**14
    report = probe(net(), [x], candidates=("mxfp8_regroup128", "mxfp8"))
    assert report.layers[0].decision == "mxfp8"


def test_probe_says_when_there_is_nothing_to_measure():
    with pytest.raises(ValueError, match="empty"):
        probe(net(), [])
    with pytest.raises(ValueError, match="no linear layer ran"):
        probe(nn.Sequential(nn.LayerNorm(8)), [torch.randn(2, 8)])


def test_sqnr_and_saturation_by_hand():
    assert sqnr_db(torch.tensor([10.0]), torch.tensor([9.0])) == pytest.approx(20.0)
    assert sqnr_db(torch.ones(2), torch.ones(2)) == math.inf
    assert math.isnan(sqnr_db(torch.ones(1), torch.tensor([math.nan])))
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 500.0, 1e-5
    assert saturation_underflow(x, quantize(x, 1, "e4m3", "floor")) == pytest.approx((1 / 32, 1 / 32))
    assert saturation_underflow(x, quantize(x, 1)) == pytest.approx((0.0, 1 / 32))


def test_monitor_logs_at_intervals_and_demotes_a_layer_that_drifts():
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.ReLU(), nn.Linear(128, 128, bias=False))
    convert(model, "mxfp8")
    monitor = PrecisionMonitor(model, interval=2, min_sqnr_db=20.0, patience=2)
    x = torch.randn(64, 128)
    logged = {}
    for step in range(8):
        if step == 4:
            with torch.no_grad():
                # Cancelling columns: the result is tiny next to its terms, so rounding them ruins it.
                model[2].weight.copy_(torch.randn(128, 128))
                model[2].weight[:, 1::2] = -model[2].weight[:, ::2] * 1.001
        monitor.before_step(step)
        hidden = model[1](model[0](x))
        if step >= 4:
            hidden = hidden[:, ::2].repeat_interleave(2, 1)
        out = model[2](hidden)
        out.square().mean().backward()
        if step == 6:
            with pytest.warns(PrecisionCostWarning, match="measurements in a row"):
                logged[step] = monitor.after_step(step)
        else:
            logged[step] = monitor.after_step(step)
    assert logged[1] == logged[3] == {}
    assert logged[0]["precision/2/forward/sqnr(dB)"] > 24
    assert logged[4]["precision/2/forward/sqnr(dB)"] < 20
    assert logged[6]["precision/2/demoted"] == 1.0
    assert "bf16" in model[2].fallback
    assert model[0].fallback is None


def test_one_good_measurement_forgives_the_bad_ones_before_it(monkeypatch):
    worst = iter([10.0, 30.0, 10.0, 10.0])
    monkeypatch.setattr(
        "gemworks.precision.monitor.measure_layer",
        lambda *_: Candidate("", (ProductReport("forward", next(worst), 0.0, 0.0),), 0.0, None),
    )
    model = nn.Sequential(nn.Linear(128, 128))
    convert(model, "mxfp8")
    monitor = PrecisionMonitor(model, interval=1, min_sqnr_db=20.0, patience=2)

    def measured(step):
        monitor.before_step(step)
        model(torch.randn(8, 128)).sum().backward()
        return "precision/0/demoted" in monitor.after_step(step)

    assert [measured(step) for step in range(3)] == [False, False, False]
    with pytest.warns(PrecisionCostWarning, match="2 measurements in a row"):
        assert measured(3)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=3),
    format=st.sampled_from(["e4m3", "e5m2", "e2m1"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_codec_round_trips_any_shape(shape, format, dtype):
    """Empty, scalar and odd sizes; the payload is as long as promised."""
    codec = MXCodec(format)
    x = torch.randn(shape).to(dtype)
    payload, context = codec.encode(x)
    assert payload.dtype is torch.uint8
    assert payload.numel() == codec.nbytes(tuple(shape), dtype)
    back = codec.decode(payload.clone(), context)
    assert (back.shape, back.dtype) == (x.shape, dtype)
    assert torch.equal(back, quantize(x.reshape(-1), 0, format).dequantize(dtype).reshape(x.shape))


def test_codec_compresses_and_checks_its_payload():
    codec = MXCodec()
    assert codec.nbytes((1024, 1024)) * 1.9 < 2 * 1024 * 1024
    payload, context = codec.encode(torch.randn(64, 64))
    with pytest.raises(ValueError, match="context that encoded it"):
        codec.decode(payload[:-1], context)
    with pytest.raises(ValueError, match="block"):
        MXCodec(block=5)
    assert context == MXContext((64, 64), torch.float32)


def test_no_checkpoint_from_a_step_with_broken_gradients():
    """P9: NaN in one activation reaches a weight gradient, and the guard names it before anything is written."""
    model = net()
    convert(model, recipe("mxfp8", save="both"))
    x = torch.randn(64, 128)
    model(x).square().mean().backward()
    check_before_checkpoint(model, torch.tensor(1.0))
    for p in model.parameters():
        p.grad = None
    x[3, 3] = math.nan
    loss = model(x).square().mean()
    loss.backward()
    with pytest.raises(NonFiniteError, match=r"loss, 0\.weight\.grad.*no checkpoint is written"):
        check_before_checkpoint(model, loss)
    assert non_finite([("a", None), ("b", torch.tensor([math.inf])), ("c", torch.ones(2))]) == ["b"]
    assert non_finite([]) == []
