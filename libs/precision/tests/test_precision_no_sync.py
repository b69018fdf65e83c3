"""Planes of jagged data never wait for the device: on a GPU torch says so, on a CPU each operator is watched."""

import pytest
import torch
from gemworks.precision import Hadamard, Stochastic, constants, quantize, quantize_both
from gemworks.precision.attention import head_plane
from gemworks.precision.casts import CastSpec, cast, cast_both
from gemworks.precision.head_tiles import head_tiles
from gemworks.precision.jagged import quantize_jagged
from gemworks.precision.recipe import GemmKind
from torch.utils._python_dispatch import TorchDispatchMode

LENGTHS = (0, 5, 32, 1, 127, 129, 0, 90)


def made(device):
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(LENGTHS).cumsum(0)])
    total = int(offsets[-1]) + 3  # rows past the last offset
    x = torch.randn(total, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    return x.to(device), offsets.to(device)


def jagged(x, offsets, **options):
    plane = quantize_jagged(x, offsets, **options)
    return plane.plane.codes, plane.dequantize(x.shape[0])


def of_heads(x, offsets, **options):
    tiles = head_tiles(x.view(-1, 4, 64), offsets, **options)
    return tiles.codes, tiles.dequantize()


def of_casts(planes):
    return [plane.dequantize() for plane in planes if hasattr(plane, "dequantize")]


CALLS = {
    "jagged rows": jagged,
    "jagged, 128 wide": lambda x, o: jagged(x, o, block=128),
    "jagged, E5M2, ceil": lambda x, o: jagged(x, o, format="e5m2", scale_mode="ceil"),
    "jagged, transformed": lambda x, o: jagged(x, o, hadamard=Hadamard(32, seed=0)),
    "jagged, stochastic": lambda x, o: jagged(x, o, stochastic=Stochastic(1, 2)),
    "along the width": lambda x, o: of_casts([quantize(x, 1)]),
    "both dims in one read": lambda x, o: of_casts(quantize_both(x[:352])),
    "cast along the width": lambda x, o: of_casts(cast(x, 1, CastSpec(GemmKind.MXFP8))),
    "cast, both": lambda x, o: of_casts(cast_both(x[:352], CastSpec(GemmKind.MXFP8))),
    "squares of heads": lambda x, o: of_casts([head_plane(x.view(-1, 4, 64), square=True)]),
    "head-wide": lambda x, o: of_casts([head_plane(x.view(-1, 4, 64), square=False)]),
    "tiles": of_heads,
    "tiles, transposed": lambda x, o: of_heads(x, o, transposed=True),
}
READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique", "unique", "bincount")
READS += ("repeat_interleave.Tensor", "lift_fresh")  # the last is torch.tensor of numbers, which a device has copied


def refuse(*_):
    raise AssertionError("tolist waits for the device")


class NoReads(TorchDispatchMode):
    """Refuses the operators whose result, or its shape, a host would have to read from the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if name.startswith(READS):
            raise AssertionError(f"{name} waits for the device")
        if name.startswith("index.Tensor") and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise AssertionError("an index by booleans waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.reference
@pytest.mark.parametrize("call", CALLS)
def test_no_operator_reads_the_device(call, monkeypatch):
    x, offsets = made("cpu")
    # On a CPU the offsets' values are looked at, which is what `check_offsets` says; a device's are not.
    monkeypatch.setattr("gemworks.precision.jagged.check_offsets", lambda *_: None)
    CALLS[call](x, offsets)
    # What was made once is taken again; under a mode it would be made anew, which no call without one does.
    monkeypatch.setattr("gemworks.precision.formats.made_once", lambda name, device, _: constants._made[name, device])
    monkeypatch.setattr(torch.Tensor, "tolist", refuse)  # torch reads a CPU's memory without an operator
    with NoReads():
        CALLS[call](x, offsets)


@pytest.mark.reference
def test_the_watcher_sees_what_it_is_for(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    x = torch.arange(4.0)
    reads = (lambda: x[0].item(), lambda: x.tolist(), lambda: x[x > 1], lambda: x.nonzero(), lambda: bool(x.sum()))
    for read in (*reads, lambda: torch.tensor([1, 2])):
        with pytest.raises(AssertionError, match="waits for the device"), NoReads():
            read()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("call", CALLS)
def test_planes_of_jagged_data_do_not_synchronise(call):
    x, offsets = made("cuda")
    CALLS[call](x, offsets)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        CALLS[call](x, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
