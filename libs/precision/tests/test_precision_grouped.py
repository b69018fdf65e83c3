# Gradients are Optional and submodules are Tensor | Module to the checker; a wrong one fails the test anyway.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportOptionalSubscript=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
"""`mx_grouped_linear`: one linear per group of rows."""

import math

import pytest
import torch
from gemworks.precision import mx_grouped_linear, mx_linear, recipe
from gemworks.precision.grouped import _zero_past_end
from gemworks.precision.jagged import pad_rows

pytestmark = pytest.mark.reference

KINDS = ["mxfp8", "mxfp8_regroup128", "fp8_block128"]
LENGTHS = [0, 5, 70, 0, 64, 1]


def data(m=70, k=256, n=128, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(n, k, generator=generator) / math.sqrt(k)).requires_grad_()
    b = torch.randn(n, generator=generator).requires_grad_()
    dy = torch.randn(m, n, generator=generator).to(dtype)
    return x, w, b, dy


def sqnr_db(reference, value):
    reference, value = reference.double(), value.double()
    return (10 * torch.log10(reference.square().sum() / (value - reference).square().sum())).item()


@pytest.mark.parametrize("kind", ["bf16", *KINDS])
def test_grouped_equals_one_linear_per_group(kind):
    """P6 group sizes of any kind, empty ones too; P10 rows past the end hold NaN and reach nothing."""
    offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    total = int(offsets[-1])
    x = torch.randn(total + 9, 128)
    x[total:] = math.nan
    x.requires_grad_()
    w = (torch.randn(len(LENGTHS), 256, 128) / 16).requires_grad_()
    dy = torch.randn(total + 9, 256)
    dy[total:] = math.nan
    y = mx_grouped_linear(x, w, offsets, kind)
    y.backward(dy)
    assert not y[total:].any()
    assert not x.grad[total:].any()
    for g in range(len(LENGTHS)):
        rows = slice(int(offsets[g]), int(offsets[g + 1]))
        xs = x.detach()[rows].requires_grad_()
        ws = w.detach()[g].clone().requires_grad_()
        ys = mx_linear(xs, ws, None, kind)
        ys.backward(dy[rows])
        torch.testing.assert_close(y[rows], ys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.grad[rows], xs.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(w.grad[g], ws.grad, rtol=1e-5, atol=1e-4)


def test_grouped_with_hadamard_and_stochastic_gradients():
    offsets = torch.tensor([0, 40, 100], dtype=torch.int32)
    x = torch.randn(100, 128, requires_grad=True)
    w = torch.randn(2, 128, 128, requires_grad=True)
    dy = torch.randn(100, 128)
    chosen = recipe("mxfp8", hadamard_size=128, stochastic_gradients=True)
    mx_grouped_linear(x, w, offsets, chosen, step=3).backward(dy)
    exact = torch.stack((dy[:40].t() @ x.detach()[:40], dy[40:].t() @ x.detach()[40:]))
    assert sqnr_db(exact, w.grad) > 22


def test_of_grouped_layers_both_gradients_are_rounded_stochastically_by_step():
    x, w, _, dy = data()
    groups, offsets = w.detach().expand(2, *w.shape).clone().requires_grad_(), torch.tensor([0, 20, 70])
    chosen = recipe("mxfp8", stochastic_gradients=True)
    found = []
    for step in (3, 3, 4):
        y = mx_grouped_linear(x, groups, offsets, chosen, step=step)
        found.append((y, *torch.autograd.grad(y, (x, groups), dy)))
    first, again, other = found
    assert [torch.equal(a, b) for a, b in zip(first, again, strict=True)] == [True, True, True]
    assert [torch.equal(a, b) for a, b in zip(first, other, strict=True)] == [True, False, False]


def test_rows_past_the_end_are_zero_whatever_they_were():
    """On a GPU products of groups leave them as memory was; groups looped over on a CPU never write them."""
    kept = _zero_past_end(torch.full((5, 2), math.nan), torch.tensor([0, 1, 3]))
    assert kept.isnan().all(1).tolist() == [True, True, True, False, False]
    assert not kept[3:].any()


def test_grouped_input_is_checked():
    offsets = torch.tensor([0, 4])
    with pytest.raises(ValueError, match=r"\[T, K\]"):
        mx_grouped_linear(torch.randn(4, 64), torch.randn(64, 64), offsets)
    with pytest.raises(ValueError, match="offsets"):
        mx_grouped_linear(torch.randn(4, 64), torch.randn(2, 64, 64), offsets)
    with pytest.raises(ValueError, match="multiples of 32"):
        mx_grouped_linear(torch.randn(4, 16), torch.randn(1, 64, 16), offsets)


def test_of_the_rows_of_frozen_groups_nothing_is_kept():
    x, w, _, dy = data()
    kept: list[torch.Tensor] = []
    groups, offsets = w.detach().expand(2, *w.shape), torch.tensor([0, 20, 70])
    for chosen in ("mxfp8", "bf16"):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
            y = mx_grouped_linear(x, groups, offsets, chosen)
        assert {tuple(t.shape) for t in kept} == {(2, *w.shape), (3,)}
        (dx,) = torch.autograd.grad(y, x, dy)
        (same,) = torch.autograd.grad(mx_linear(x, w.detach(), None, chosen), x, dy)
        torch.testing.assert_close(dx, same)


@pytest.mark.filterwarnings("ignore:.*input value tensor is non-contiguous")  # how vmap lays out positions
def test_groups_are_padded_under_vmap():
    """A transform reads no values of offsets."""
    x = torch.arange(20.0).reshape(2, 5, 2)
    offsets = torch.tensor([[0, 2, 5], [0, 4, 5]])
    padded, starts = torch.func.vmap(lambda x, offsets: pad_rows(x, offsets, 4))(x, offsets)
    for i in range(2):
        alone = pad_rows(x[i], offsets[i], 4)
        assert torch.equal(padded[i], alone[0])
        assert torch.equal(starts[i], alone[1])
