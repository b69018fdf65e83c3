"""Two linear layers around an activation: equal to their parts, and what is refused."""

import pytest
import torch
from gemworks.precision import mx_linear, recipe
from gemworks.precision.activation import ACTIVATIONS
from gemworks.precision.mlp import mx_mlp

pytestmark = pytest.mark.reference


@pytest.mark.parametrize(("name", "changes"), [("mxfp8", {}), ("fp8_block128", {"square_inputs": True})])
@pytest.mark.parametrize("with_bias", [False, True])
def test_mlp_equals_its_parts(name, changes, with_bias):
    torch.manual_seed(0)
    # Rows of very different sizes: squares are told from rows with a scale of their own.
    rows = torch.logspace(-12, 0, 60, base=2).reshape(3, 20, 1)
    leaves = [torch.randn(3, 20, 128) * rows, torch.randn(256, 128) / 11, torch.randn(128, 256) / 16]
    biases = [torch.randn(256), torch.randn(128)]
    dy = torch.randn(3, 20, 128)
    activation = "silu" if with_bias else "gelu_tanh"
    results = []
    for fused in (True, False):
        x, w1, w2 = (t.clone().requires_grad_() for t in leaves)
        b1, b2 = (t.clone().requires_grad_() if with_bias else None for t in biases)
        if fused:
            y = mx_mlp(x, w1, w2, recipe(name, **changes), activation=activation, b1=b1, b2=b2)
        else:
            chosen = recipe(name, save="both", **changes)
            y = mx_linear(ACTIVATIONS[activation](mx_linear(x, w1, b1, chosen)), w2, b2, chosen)
        y.backward(dy)
        made = [t.grad for t in (x, w1, w2)] + [b.grad for b in (b1, b2) if b is not None]
        results.append([y, *made])
    for ours, parts in zip(*results, strict=True):
        assert torch.equal(ours, parts)


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block128"])
def test_without_gradients_nothing_is_kept(name):
    """No plane for a weight that is frozen, none at all under no_grad; the result is the same."""
    x, w1, w2 = torch.randn(8, 128), torch.randn(128, 128).requires_grad_(), torch.randn(128, 128).requires_grad_()
    kept: list[torch.Tensor] = []
    results = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        for first, second, num_kept in ((w1, w2, 7), (w1.detach(), w2, 5), (w1, w2.detach(), 5)):
            kept.clear()
            results.append(mx_mlp(x, first, second, name))
            assert len(kept) == num_kept
        kept.clear()
        with torch.no_grad():
            results.append(mx_mlp(x, w1, w2, name))
        assert not kept
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_only_what_is_needed_is_computed():
    x, w1, w2 = torch.randn(8, 64), torch.randn(32, 64), torch.randn(32, 32).requires_grad_()
    mx_mlp(x, w1, w2).sum().backward()
    assert w2.grad is not None
    assert x.grad is None
    assert w1.grad is None


@pytest.mark.parametrize(
    ("name", "changes", "shapes", "activation", "message"),
    [
        ("bf16", {}, ((4, 64), (32, 64), (32, 32)), "relu", "two mx_linear"),
        ("fp8_wgrad_bf16", {}, ((4, 128), (128, 128), (128, 128)), "relu", "two mx_linear"),
        ("fp8_square128", {}, ((4, 128), (128, 128), (128, 128)), "relu", "two mx_linear"),
        ("mxfp8", {"hadamard_size": 32}, ((4, 64), (32, 64), (32, 32)), "relu", "two mx_linear"),
        ("mxfp8", {}, ((4, 64), (32, 64), (32, 64)), "relu", r"expected \[F, 64\]"),
        ("mxfp8", {}, ((4, 64), (48, 64), (32, 48)), "relu", "multiples of 32"),
        ("mxfp8", {}, ((4, 64), (32, 64), (32, 32)), "tanh", "expected one of"),
    ],
)
def test_bad_input_says_what_was_expected(name, changes, shapes, activation, message):
    x, w1, w2 = (torch.zeros(shape) for shape in shapes)
    chosen = recipe(name, **changes)
    with pytest.raises(ValueError, match=message):
        mx_mlp(x, w1, w2, chosen, activation=activation)
