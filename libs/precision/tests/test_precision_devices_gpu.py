# A missing plane fails the test anyway.
# pyright: reportOptionalMemberAccess=false
"""Tensors on a second GPU while the first is current: kernels start where the tensors are, on that device's stream."""

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

from gemworks.precision import GemmKind, Hadamard, Stochastic, mx_linear
from gemworks.precision.casts import CastSpec, cast, cast_both, cast_squares
from gemworks.precision.norm import norm_cast
from gemworks.precision.projection import project_heads

pytestmark = [
    pytest.mark.gpu,
    # mxfp8 says once what its exact products cost.
    pytest.mark.filterwarnings("ignore:mxfp8 on:gemworks.precision.backends.PrecisionCostWarning"),
]
MX, WIDE = CastSpec(GemmKind.MXFP8), CastSpec(GemmKind.FP8_BLOCK128)
NOISE = CastSpec(GemmKind.MXFP8, stochastic=Stochastic(1, 2))


def planes(*made):
    return [tensor for plane in made for tensor in (plane.codes, plane.scales)]


def linear(preset):
    def run(x):
        x = x.detach().requires_grad_()
        w = x[:128].detach().clone().requires_grad_()
        y = mx_linear(x, w, None, preset)
        return [y.detach(), *torch.autograd.grad(y, (x, w), y.detach())]

    return run


def normed(x):
    made = norm_cast(x, torch.ones_like(x[0]), NOISE)
    return planes(made.rows, made.columns)


def heads(x):
    out = project_heads(x, x[:128].clone(), 64, 1)
    return [out.coded.codes, out.coded.scales, out.values]


CALLS = {
    "rows": lambda x: planes(cast(x, 1, MX)[0]),
    "rows, transformed": lambda x: planes(cast(x, 1, CastSpec(GemmKind.MXFP8, hadamard=Hadamard(32, seed=0)))[0]),
    "columns, odd": lambda x: planes(cast(x[:201, :200], 0, MX)[0]),
    "both, noise": lambda x: planes(*cast_both(x, NOISE)[:2]),
    "squares": lambda x: planes(cast_squares(x, WIDE).rows),
    "norm": normed,
    "heads": heads,
    "linear mxfp8": linear("mxfp8"),
    "linear fp8_block128": linear("fp8_block128"),
    "linear fp8_square128": linear("fp8_square128"),
}


@pytest.mark.parametrize("name", CALLS)
def test_kernels_start_on_the_device_and_stream_of_their_tensors(name):
    """The input is still being written by a side stream of the second GPU when the kernels are started; cuda:0 is
    current."""
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.cuda.set_device(0)
    expected = CALLS[name](values.cuda(0))
    late, x = values.cuda(1), torch.full_like(values, float("nan"), device="cuda:1")
    CALLS[name](late)  # compiles
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(1)
    with torch.cuda.stream(stream):
        torch.cuda.set_device(0)
        assert torch.cuda.current_stream(1) == stream
        with torch.cuda.device(1):
            torch.cuda._sleep(50_000_000)
        x.copy_(late, non_blocking=True)
        found = CALLS[name](x)
        assert torch.cuda.current_device() == 0
        stream.synchronize()
    for got, truth in zip(found, expected, strict=True):
        assert got.device == torch.device("cuda", 1)
        assert torch.equal(got.cpu(), truth.cpu())
