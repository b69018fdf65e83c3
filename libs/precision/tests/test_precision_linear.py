# Gradients are Optional and submodules are Tensor | Module to the checker; a wrong one fails the test anyway.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportOptionalSubscript=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
"""mx_linear: values, gradients, what is saved, rules, and torch.compile."""

import contextlib
import math

import pytest
import torch
from gemworks.precision import (
    GemmRecipe,
    Recipe,
    mx_linear,
    quantize,
    quantize_square,
    recipe,
    regroup,
)
from gemworks.precision.casts import CastSpec, cast
from gemworks.precision.gemms import gemm
from gemworks.precision.linear import linear_with_counts
from gemworks.precision.products import linear_backward
from gemworks.precision.recipe import GemmKind
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.reference

KINDS = ["mxfp8", "mxfp8_regroup128", "fp8_block128"]


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


def run(x, w, b, dy, chosen, **kwargs):
    x.grad = w.grad = None
    if b is not None:
        b.grad = None
    y = mx_linear(x, w, b, chosen, **kwargs)
    y.backward(dy)
    return y.detach(), x.grad, w.grad, None if b is None else b.grad


def test_mxfp8_products_are_those_of_the_dequantised_planes_exactly():
    x, w, b, dy = data()
    y, dx, dw, db = run(x, w, b, dy, "mxfp8")
    with torch.no_grad():
        q = lambda t, dim: quantize(t, dim).dequantize()  # noqa: E731
        assert torch.equal(y, q(x, 1) @ q(w, 1).t() + b)
        torch.testing.assert_close(dx, q(dy, 1) @ q(w, 0), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(dw, q(dy, 0).t() @ q(x, 0), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(db, dy.sum(0))


def test_block128_and_regrouped_planes_are_what_the_products_see():
    x, w, _, dy = data()
    y, dx, dw, _ = run(x, w, None, dy, "fp8_block128")
    with torch.no_grad():
        wide = lambda t, dim: quantize(t, dim, block=128).dequantize()  # noqa: E731
        square = quantize_square(w, block=128).dequantize()
        torch.testing.assert_close(y, wide(x, 1) @ square.t(), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(dx, wide(dy, 1) @ square, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(dw, wide(dy, 0).t() @ wide(x, 0), rtol=1e-6, atol=1e-5)
        y = mx_linear(x, w, None, "mxfp8_regroup128")
        merged = regroup(quantize_square(w), square=True)[0].dequantize()
        torch.testing.assert_close(y, regroup(quantize(x))[0].dequantize() @ merged.t(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("law", ["normal", "student_t", "log_normal"])
def test_sqnr_gates(kind, law):
    """GEMM >= 28 dB, dx >= 25, dw >= 24 against float64, on three laws."""
    torch.manual_seed(1)
    laws = {
        "normal": torch.distributions.Normal(0.0, 1.0),
        "student_t": torch.distributions.StudentT(3.0),
        "log_normal": torch.distributions.LogNormal(0.0, 1.0),
    }
    x = laws[law].sample((512, 1024)).requires_grad_()
    sign = torch.where(torch.rand(256, 1024) < 0.5, -1.0, 1.0)
    w = (laws[law].sample((256, 1024)) * sign / 32).requires_grad_()
    dy = laws[law].sample((512, 256)) * torch.where(torch.rand(512, 256) < 0.5, -1.0, 1.0)
    y, dx, dw, _ = run(x, w, None, dy, kind)
    xd, wd, dyd = x.detach().double(), w.detach().double(), dy.double()
    assert sqnr_db(xd @ wd.t(), y) >= 28
    assert sqnr_db(dyd @ wd, dx) >= 25
    assert sqnr_db(dyd.t() @ xd, dw) >= 24


@pytest.mark.parametrize("save", ["high_precision", "row", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_for_backward(kind, save):
    x, w, _, dy = data(m=160)
    chosen = recipe(kind, save=save)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = mx_linear(x, w, None, chosen)
    y.backward(dy)
    bytes_for_x = sum(t.numel() * t.element_size() for t in saved if t is not w and t.shape != w.shape)
    expected = {"high_precision": 4 * x.numel(), "row": 1.04 * x.numel(), "both": 1.05 * x.numel()}[save]
    assert bytes_for_x <= expected
    if save == "high_precision":
        assert bytes_for_x == 4 * x.numel()
    reference = run(x, w, None, dy, recipe(kind))[2]
    if save == "row":
        assert sqnr_db(reference, run(x, w, None, dy, chosen)[2]) > 27
    else:
        assert torch.equal(run(x, w, None, dy, chosen)[2], reference)


def test_each_product_has_its_own_format():
    x, w, _, dy = data()
    chosen = Recipe("mixed", GemmRecipe(), GemmRecipe(left="e5m2"), GemmRecipe("bf16"))
    _, dx, dw, _ = run(x, w, None, dy, chosen)
    with torch.no_grad():
        torch.testing.assert_close(dw, dy.t() @ x)
        expected = quantize(dy, 1, "e5m2").dequantize() @ quantize(w, 0).dequantize()
        torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("square_weights", [False, True])
def test_each_operand_has_its_own_format(square_weights):
    """The weight of dgrad is not that of forward, nor the input of wgrad that of forward."""
    x, w, _, dy = data()
    products = (GemmRecipe(left="e5m2"), GemmRecipe(right="e5m2"), GemmRecipe(left="e5m2"))
    chosen = Recipe("mixed", *products, square_weights=square_weights)
    y, dx, dw, _ = run(x, w, None, dy, chosen)

    def weight(dim: int, format: str) -> torch.Tensor:
        return (quantize_square(w, format) if square_weights else quantize(w, dim, format)).dequantize()

    with torch.no_grad():
        expected = quantize(x, 1, "e5m2").dequantize() @ weight(1, "e4m3").t()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dx, quantize(dy, 1).dequantize() @ weight(0, "e5m2"), rtol=1e-5, atol=1e-5)
        expected = quantize(dy, 0, "e5m2").dequantize().t() @ quantize(x, 0).dequantize()
        torch.testing.assert_close(dw, expected, rtol=1e-5, atol=1e-5)


def test_a_weight_gathered_along_k_is_quantised_again_in_the_format_of_dgrad():
    x, w, _, dy = data()
    chosen = Recipe("mixed", GemmRecipe(), GemmRecipe(right="e5m2"), GemmRecipe())
    with torch.no_grad():
        gathered = quantize(w, 1)
        dx, _ = linear_backward(dy, x, gathered, chosen, 0, True, False, torch.float32, torch.float32)
        again = quantize(gathered.dequantize(torch.bfloat16), 0, "e5m2").dequantize()
        torch.testing.assert_close(dx, quantize(dy, 1).dequantize() @ again, rtol=1e-5, atol=1e-5)


class Watching(TorchDispatchMode):
    """A mode of any kind makes the layer take its op, as a compiler does; it knows the names of the ops that it saw."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("as_op", [False, True])
@pytest.mark.parametrize("save", ["high_precision", "row", "both"])
def test_of_the_input_of_a_frozen_weight_nothing_is_kept(save, as_op):
    x, w, _, dy = data()
    kept: list[torch.Tensor] = []
    watching = Watching() if as_op else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t), watching:
        y = mx_linear(x, w.detach(), None, recipe("mxfp8", save=save))
    assert {tuple(t.shape) for t in kept if t.numel()} == {tuple(w.shape)}
    y.backward(dy)
    with torch.no_grad():
        expected = quantize(dy, 1).dequantize() @ quantize(w, 0).dequantize()
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-5)


def test_an_op_that_saved_nothing_says_that_a_gradient_of_the_weight_needs_it():
    x, w, _, dy = data()
    y, *_ = torch.ops.gemworks_precision.linear(x, w, None, recipe("mxfp8").text, 0, False, x.dtype)
    with pytest.raises(ValueError, match="save: was False, but the weight wants a gradient"):
        y.backward(dy)
    y, *_ = torch.ops.gemworks_precision.linear(x, w.detach(), None, recipe("mxfp8").text, 0, False, x.dtype)
    y.backward(dy)
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("as_op", [False, True])
def test_gradients_of_biases_are_summed_in_fp32(as_op):
    x, w, b, dy = data(m=300, dtype=torch.bfloat16)
    with Watching() if as_op else contextlib.nullcontext():
        y = mx_linear(x, w, b, "mxfp8")
    y.backward(dy)
    assert torch.equal(b.grad, dy.float().sum(0))


def test_all_bf16_recipe_is_the_plain_layer():
    x, w, b, dy = data()
    y, dx, dw, _ = run(x, w, b, dy, "bf16")
    torch.testing.assert_close(y, nn.functional.linear(x, w, b))
    torch.testing.assert_close(dx, dy @ w)
    torch.testing.assert_close(dw, dy.t() @ x)


def test_square_weights_use_one_plane_for_both_products():
    x, w, _, dy = data()
    y, dx, _, _ = run(x, w, None, dy, recipe("mxfp8", square_weights=True))
    with torch.no_grad():
        plane = quantize_square(w).dequantize()
        assert torch.equal(y, quantize(x, 1).dequantize() @ plane.t())
        torch.testing.assert_close(dx, quantize(dy, 1).dequantize() @ plane, rtol=1e-6, atol=1e-6)


def test_hadamard_and_stochastic_rounding_in_the_weight_gradient():
    x, w, _, dy = data(m=200)
    exact = dy.t() @ x.detach()
    chosen = recipe("mxfp8", hadamard_size=64, stochastic_gradients=True, seed=5)
    first = run(x, w, None, dy, chosen, step=1)[2]
    assert sqnr_db(exact, first) > 22
    assert torch.equal(first, run(x, w, None, dy, chosen, step=1)[2])
    assert not torch.equal(first, run(x, w, None, dy, chosen, step=2)[2])
    plain = run(x, w, None, dy, recipe("mxfp8", hadamard_size=64))[2]
    assert sqnr_db(exact, plain) > 24


@pytest.mark.parametrize("changes", [{}, {"square_gradients": True}, {"hadamard_size": 32}])
def test_both_gradients_are_rounded_stochastically_by_step(changes):
    """One cast of the output gradient for both products, squares, or one of their own each."""
    x, w, _, dy = data(m=64)
    chosen = recipe("mxfp8", stochastic_gradients=True, **changes)
    first, again, other = (run(x, w, None, dy, chosen, step=step)[:3] for step in (1, 1, 2))
    assert [torch.equal(a, b) for a, b in zip(first, again, strict=True)] == [True, True, True]
    assert [torch.equal(a, b) for a, b in zip(first, other, strict=True)] == [True, False, False]


@pytest.mark.parametrize("m", [0, 1, 3, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_rows(kind, m):
    x, w, b, dy = data(m=m)
    y, dx, dw, db = run(x, w, b, dy, kind)
    assert y.shape == (m, 128)
    assert dx.shape == x.shape
    assert dw.isfinite().all()
    if m == 0:
        assert not dw.any()
        assert not db.any()


def test_non_contiguous_and_expanded_gradients():
    x, w, _, _ = data(m=64)
    mx_linear(x, w).sum().backward()
    first = x.grad.clone()
    x.grad = None
    mx_linear(x, w).backward(torch.ones(64, 128))
    assert torch.equal(first, x.grad)
    y = mx_linear(x.detach().t().contiguous().t(), w)
    assert torch.equal(y, mx_linear(x, w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_keeps_its_dtype_and_the_master_its_own(dtype):
    x, w, b, dy = data(dtype=dtype)
    y, dx, dw, db = run(x, w, b, dy, "mxfp8")
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (dtype, dtype, torch.float32, torch.float32)


def test_autocast_decides_the_output():
    x, w, b, _ = data()
    with torch.autocast("cpu", torch.bfloat16):
        y = mx_linear(x, w, b)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype is torch.float32


def test_leading_dims_and_frozen_operands():
    x, w, _, _ = data(m=12)
    y = mx_linear(x.reshape(3, 4, 256), w)
    assert torch.equal(y.reshape(12, 128), mx_linear(x, w))
    mx_linear(x, w.detach()).sum().backward()
    assert w.grad is None
    assert x.grad is not None
    mx_linear(x.detach(), w).sum().backward()
    assert w.grad is not None


def test_nan_and_inf_reach_the_output_in_their_row_only():
    """P8, P9: a non-finite input is not turned into a number, and does not spread over other rows in forward."""
    x, w, _, _ = data()
    bad = x.detach().clone()
    bad[3, 40] = math.inf
    bad[5, 2] = math.nan
    y = mx_linear(bad, w)
    assert y[[3, 5]].isnan().all()
    rest = [i for i in range(70) if i not in (3, 5)]
    assert torch.equal(y[rest], mx_linear(x, w)[rest])


def test_odd_layers_are_refused_with_the_rule():
    """P7: last dimension 16, an error that names the multiple and the rule instead of an assertion in backward."""
    with pytest.raises(ValueError, match="multiples of 32") as error:
        mx_linear(torch.randn(4, 16), torch.randn(64, 16))
    assert "convert() does by rule" in str(error.value)
    assert "in_features 16 is not a multiple of 32" in str(error.value)
    with pytest.raises(ValueError, match="multiples of 128"):
        mx_linear(torch.randn(4, 128), torch.randn(96, 128), None, "fp8_block128")
    with pytest.raises(ValueError, match="in_features"):
        mx_linear(torch.randn(4, 64), torch.randn(64, 32))


def test_the_reference_backend_named_equals_auto_on_the_cpu():
    x, w, _, _ = data()
    assert torch.equal(mx_linear(x, w), mx_linear(x, w, None, recipe("mxfp8", backend="reference")))
    with pytest.raises(ValueError, match="needs a CUDA device"):
        mx_linear(x, w, None, recipe("mxfp8", backend="scaled_mm"))


def test_product_operands_are_checked():
    a, b = quantize(torch.randn(4, 64)), quantize(torch.randn(8, 96))
    with pytest.raises(ValueError, match="contractions 64"):
        gemm(a, b, GemmKind.MXFP8, torch.float32)
    with pytest.raises(ValueError, match="dim 0"):
        gemm(a, quantize(torch.randn(8, 64), 0), GemmKind.MXFP8, torch.float32)


@pytest.mark.parametrize("save", ["high_precision", "row", "both"])
def test_opcheck(save):
    x, w, b, _ = data(m=40)
    text = recipe("mxfp8", save=save).to_toml()
    arguments = (x, w, b, text, 0, True, torch.float32)
    torch.library.opcheck(torch.ops.gemworks_precision.linear.default, arguments)
    empty = torch.empty(0, dtype=torch.uint8)
    if save == "high_precision":
        torch.library.opcheck(
            torch.ops.gemworks_precision.linear_backward.default,
            (torch.randn(40, 128), x.detach(), w.detach(), empty, empty, text, 0, True, True, torch.float32, 256),
        )


def test_compiles_as_one_graph_over_two_sizes():
    w, b = data()[1:3]
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(lambda t: mx_linear(t, w, b).relu(), fullgraph=True, backend=backend, dynamic=True)
    for m in (70, 33, 50):
        x = torch.randn(m, 256)
        assert torch.equal(compiled(x), mx_linear(x, w, b).relu())
    assert len(graphs) == 1


def test_a_recipe_that_no_eager_layer_has_read_compiles():
    x, w, b, _ = data()
    chosen = recipe("mxfp8", seed=77)
    compiled = torch.compile(lambda t: mx_linear(t, w, b, chosen), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), mx_linear(x, w, b, chosen))


def test_compiled_gradients_equal_eager():
    x, w, b, dy = data()
    eager = run(x, w, b, dy, "mxfp8")
    compiled = torch.compile(lambda t: mx_linear(t, w, b), fullgraph=True, backend="aot_eager")
    x.grad = w.grad = b.grad = None
    compiled(x).backward(dy)
    assert torch.equal(x.grad, eager[1])
    assert torch.equal(w.grad, eager[2])


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp8_regroup128", "fp8_block128"])
def test_square_inputs_change_the_weight_gradient_alone(kind):
    """P5: dW is the product of dy's columns and the squares of x, and keeps its SQNR; y and dx stay as they are."""
    x, w, dy = torch.randn(200, 256), torch.randn(128, 256) / 16, torch.randn(200, 128)
    results = []
    for square in (False, True):
        leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = mx_linear(leaf, weight, None, recipe(kind, square_inputs=square))
        y.backward(dy)
        results.append((y.detach(), leaf.grad, weight.grad))
    (y0, dx0, dw0), (y1, dx1, dw1) = results
    assert torch.equal(y0, y1)
    assert torch.equal(dx0, dx1)
    assert not torch.equal(dw0, dw1)
    exact = dy.double().t() @ x.double()
    noise = (dw1.double() - exact).square().sum()
    assert 10 * torch.log10(exact.square().sum() / noise) >= 24


def test_squares_go_with_no_transform():
    for changes in ({"square_inputs": True}, {"square_gradients": True}):
        with pytest.raises(ValueError, match="square_inputs and square_gradients"):
            recipe("fp8_block128", hadamard_size=32, **changes)
    with pytest.raises(ValueError, match="square_gradients: needs"):
        recipe("fp8_block128", square_gradients=True, wgrad=GemmRecipe(GemmKind.BF16))


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp8_regroup128", "fp8_block128"])
@pytest.mark.parametrize("rows", [200, 128])
def test_one_quantisation_in_squares_serves_all_products(kind, rows):
    """y, dx and dW are the products of the squares of x, w and dy, whatever the number of rows (P6); compiled the same
    way."""
    chosen = recipe(kind, save="both", square_inputs=True, square_gradients=True, square_weights=kind == "mxfp8")
    spec = CastSpec(chosen.forward.kind)
    x, w, dy = torch.randn(rows, 256), torch.randn(128, 256) / 16, torch.randn(rows, 128)
    xq, wq, dyq = (cast(t, None, spec, "reference")[0].dequantize() for t in (x, w, dy))
    expected = xq @ wq.t(), dyq @ wq, dyq.t() @ xq
    for call in (mx_linear, torch.compile(mx_linear, fullgraph=True, backend="aot_eager")):
        leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = call(leaf, weight, None, chosen)
        y.backward(dy)
        for ours, exact in zip((y, leaf.grad, weight.grad), expected, strict=True):
            torch.testing.assert_close(ours.detach(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp8_regroup128", "fp8_block128"])
@pytest.mark.parametrize("changes", [{}, {"save": "row"}, {"save": "both"}, {"save": "both", "square_inputs": True}])
def test_the_eager_way_gives_the_bits_of_the_op(kind, changes):
    """y, dx, dW, db and the counts; a mode that watches ops sees the layer's."""
    chosen = recipe(kind, **changes)
    x, w, b, dy = torch.randn(72, 256), torch.randn(128, 256), torch.randn(128), torch.randn(72, 128)
    results = []
    for watching in (contextlib.nullcontext(), Watching()):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        with watching:
            y, counts = linear_with_counts(*leaves, chosen, 0)
            y.backward(dy)
        results.append((y.detach(), counts, *(leaf.grad for leaf in leaves)))
    assert {"gemworks_precision::linear", "gemworks_precision::linear_backward"} <= watching.names
    for eager, op in zip(*results, strict=True):
        assert torch.equal(eager, op)


def test_saved_tensors_of_the_eager_way_pass_the_hooks():
    """Whoever offloads or compresses what backward needs sees the plane, and may replace it."""
    seen = []
    x, w = torch.randn(64, 256, requires_grad=True), torch.randn(128, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        y = mx_linear(x, w, None, recipe("mxfp8", save="both"))
    assert {(t.dtype, tuple(t.shape)) for t in seen} == {
        (torch.float32, (128, 256)), (torch.uint8, (64, 256)), (torch.uint8, (2, 256))
    }  # fmt: skip
    y.sum().backward()
    assert w.grad is not None
