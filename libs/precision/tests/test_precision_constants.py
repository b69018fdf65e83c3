# The stand-ins are no devices to the checker.
# pyright: reportAttributeAccessIssue=false
"""Tensors that are made once serve every later call: not those of modes, of inference or of a graph's capture."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from gemworks.precision import constants, decode, quantize
from gemworks.precision.constants import kept_zeros, made_once
from gemworks.precision.products import no_counts
from gemworks.precision.short_casts import unread_count
from gemworks.precision.triton_tiles import no_count
from torch import Tensor
from torch._subclasses import FakeTensorMode

pytestmark = pytest.mark.reference

CPU = torch.device("cpu")
CODES = torch.tensor([0x01, 0x7E], dtype=torch.uint8)


@pytest.fixture(autouse=True)
def nothing_made(monkeypatch):
    monkeypatch.setattr(constants, "_made", {})


@pytest.mark.parametrize("make", [no_counts, no_count, unread_count, lambda device: kept_zeros(device, torch.int8, 1)])
def test_a_fake_is_not_kept(make):
    with FakeTensorMode():
        assert type(make(CPU)) is not Tensor
    kept = make(CPU)
    assert type(kept) is Tensor
    assert make(CPU) is kept
    with FakeTensorMode():
        assert type(make(CPU)) is not Tensor, "a fake mode takes no real tensor"
    assert make(CPU) is kept


def test_decoding_under_a_fake_mode_leaves_decoding_alone():
    with FakeTensorMode() as mode:
        fake = decode(mode.from_tensor(CODES), "e4m3")
        assert fake.shape == (2,)
    assert decode(CODES, "e4m3").tolist() == [0.001953125, 448.0]
    with mode:
        assert type(decode(mode.from_tensor(CODES), "e4m3")) is type(fake)


def test_what_inference_made_can_be_saved_for_a_backward():
    with torch.inference_mode():
        kept = no_counts(CPU)
    assert not kept.is_inference()


def test_decoding_compiles_before_and_after_its_table_is_made():
    for _ in range(2):
        torch.compiler.reset()
        read = torch.compile(lambda codes: decode(codes, "e4m3"), backend="eager", fullgraph=True)
        assert read(CODES).tolist() == decode(CODES, "e4m3").tolist()


def test_a_capture_keeps_nothing_and_what_is_kept_is_written_before_others_read_it(monkeypatch):
    capturing, synchronised = [True], []
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    event = SimpleNamespace(
        record=lambda: synchronised.append("recorded"), synchronize=lambda: synchronised.append("waited for")
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    gpu = torch.device("cuda", 0)

    def make() -> Tensor:
        return torch.zeros(1)

    assert made_once("a", gpu, make) is not made_once("a", gpu, make)
    assert not synchronised
    capturing[0] = False
    kept = made_once("a", gpu, make)
    capturing[0] = True
    assert made_once("a", gpu, make) is kept
    assert synchronised == ["recorded", "waited for"]


def test_planes_made_under_a_fake_mode_and_then_for_real():
    x = torch.randn(4, 64)
    with FakeTensorMode() as mode:
        assert quantize(mode.from_tensor(x)).dequantize().shape == (4, 64)
    assert quantize(x).dequantize().isfinite().all()
