"""flash_attention, gdpa and block_attention against loops over single sequences: values and every gradient, float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import (
    AttentionBias,
    Rope,
    apply_rope,
    block_attention,
    flash_attention,
    gdpa,
    offsets_from_lengths,
    rms_norm,
    seed_pool,
)
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS
from gemworks.jagged.testing import activation_weights, attention_loop, softmax_weights
from torch import Tensor

pytestmark = pytest.mark.reference

LENGTHS_Q = [3, 0, 17, 1, 8, 0, 70]
LENGTHS_K = [5, 4, 17, 0, 1, 0, 33]
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "align": "top_left"},
    {"window": 3},
    {"window": 3, "causal": True},
    {"window": (2, -1), "align": "top_left"},
    {"window": (0, 4)},
]


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * len(shape) + shape[0])
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def assert_same(ours: Tensor, truth: Tensor, leaves: list[Tensor]) -> None:
    """Values, then the gradient of every leaf for one random cotangent."""
    torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-10)
    cotangent = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(ours, leaves, cotangent)
    expected = torch.autograd.grad(truth, leaves, cotangent, materialize_grads=True)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-8, atol=1e-9)


def make(kind: str, *, heads: int = 4, key_heads: int = 2, width: int = 6, value_width: int = 5) -> dict[str, Any]:
    """Arguments of one layout: self, cross (different lengths), fixed (4-D k), shared (one q for the batch)."""
    offsets_q = offsets_from_lengths(torch.tensor(LENGTHS_Q))
    offsets_k = offsets_from_lengths(torch.tensor(LENGTHS_K, dtype=torch.int32))
    total_q, total_k = int(offsets_q[-1]), int(offsets_k[-1])
    q = leaf(total_q + 2, heads, width, seed=1)  # two rows past the end
    if kind == "self":
        k, v = leaf(total_q + 2, key_heads, width, seed=2), leaf(total_q + 2, key_heads, value_width, seed=3)
        return {"q": q, "k": k, "v": v, "offsets_q": offsets_q, "max_length_q": 128}
    if kind == "fixed":
        k, v = leaf(7, 9, key_heads, width, seed=2), leaf(7, 9, key_heads, value_width, seed=3)
        return {"q": q, "k": k, "v": v, "offsets_q": offsets_q, "max_length_q": 128}
    k, v = leaf(total_k + 1, key_heads, width, seed=2), leaf(total_k + 1, key_heads, value_width, seed=3)
    sides = {"k": k, "v": v, "offsets_k": offsets_k, "max_length_k": 64}
    if kind == "cross":
        return {"q": q, "offsets_q": offsets_q, "max_length_q": 128, **sides}
    return {"q": leaf(11, heads, width, seed=4), "offsets_q": None, "shared_query": True, **sides}


def without_bounds(args: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in args.items() if not name.startswith("max_length")}


KINDS = ["self", "cross", "fixed", "shared"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_flash_attention_equals_loops(kind: str, mask: dict[str, Any]) -> None:
    args = make(kind)
    leaves = [args["q"], args["k"], args["v"]]
    ours = flash_attention(**args, scale=0.7, **mask)
    truth = attention_loop(**without_bounds(args), weigh=softmax_weights, scale=0.7, **mask)
    assert ours.shape == truth.shape
    assert_same(ours, truth, leaves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS[:5], ids=str)
def test_gdpa_equals_loops(kind: str, mask: dict[str, Any]) -> None:
    args = make(kind)
    ours = gdpa(**args, scale=0.3, activation="silu", **mask)
    weigh = activation_weights(torch.nn.functional.silu)
    truth = attention_loop(**without_bounds(args), weigh=weigh, scale=0.3, **mask)
    assert_same(ours, truth, [args["q"], args["k"], args["v"]])


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gdpa_every_activation_j11(activation: Any) -> None:
    """J11: the CPU path computes the activation that was asked for, values and gradients."""
    args = make("self")
    ours = gdpa(**args, scale=1.5, activation=activation)
    weigh = activation_weights(ACTIVATIONS[activation])
    truth = attention_loop(**without_bounds(args), weigh=weigh, scale=1.5)
    assert_same(ours, truth, [args["q"], args["k"], args["v"]])
    softmax = flash_attention(**args, scale=1.5)
    assert not torch.allclose(ours, softmax)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("kind", ["self", "cross", "fixed"])
@pytest.mark.parametrize("tables", ["position", "time", "both"])
def test_bias_equals_loops(kind: str, tables: str, align: Any) -> None:
    args = make(kind)
    generator = torch.Generator().manual_seed(5)
    rows_q = args["q"].shape[0]
    rows_k = args["k"].shape[0] if kind != "fixed" else 7 * 9
    position = leaf(7, 4, seed=8) if tables != "time" else None
    time = leaf(6, 4, seed=9) if tables != "position" else None
    times_q = torch.randint(0, 5000, (rows_q,), generator=generator)
    times_k = None if kind == "self" else torch.randint(0, 5000, (rows_k,), generator=generator)
    bias = AttentionBias(position, time, times_q, times_k, 60)
    ours = flash_attention(**args, bias=bias, causal=True, align=align)
    loop = without_bounds(args)
    if kind == "fixed":  # the loop reads timestamps by packed row: give it packed keys
        loop |= {"k": args["k"].flatten(0, 1), "v": args["v"].flatten(0, 1), "offsets_k": torch.arange(0, 64, 9)}
    truth = attention_loop(**loop, weigh=softmax_weights, scale=6**-0.5, bias=bias, causal=True, align=align)
    leaves = [args["q"], args["k"], args["v"], *(t for t in (position, time) if t is not None)]
    assert_same(ours, truth, leaves)


def test_position_bias_with_shared_query_equals_loops() -> None:
    args = make("shared")
    bias = AttentionBias(position_table=leaf(9, 4, seed=8))
    ours = flash_attention(**args, bias=bias)
    truth = attention_loop(**without_bounds(args), weigh=softmax_weights, scale=6**-0.5, bias=bias)
    assert bias.position_table is not None
    assert_same(ours, truth, [args["q"], args["k"], args["v"], bias.position_table])


@pytest.mark.parametrize("kind", KINDS)
def test_qk_norm_and_rope_equal_their_definitions(kind: str) -> None:
    args = make(kind)
    q, k = args["q"], args["k"]
    rope: dict[str, Any] = {}
    loop = without_bounds(args)
    loop["q"], loop["k"] = rms_norm(q), rms_norm(k)
    if kind in ("self", "cross"):
        spec = Rope(time_fraction=0.34)
        dt_q, dt_k = torch.rand(q.shape[0]).double() * 1e5, torch.rand(k.shape[0]).double() * 1e5
        tables_q = spec.tables(args["offsets_q"], 6, total=q.shape[0], dt=dt_q, dtype=torch.float64)
        rope["rope"] = tables_q
        tables_k = tables_q
        if kind == "cross":
            tables_k = spec.tables(args["offsets_k"], 6, total=k.shape[0], dt=dt_k, dtype=torch.float64)
            rope["rope_k"] = tables_k
        loop["q"], loop["k"] = apply_rope(loop["q"], tables_q), apply_rope(loop["k"], tables_k)
    ours = flash_attention(**args, qk_norm=True, **rope)
    truth = attention_loop(**loop, weigh=softmax_weights, scale=6**-0.5)
    assert_same(ours, truth, [q, k, args["v"]])


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_block_attention_equals_loops_with_a_block_mask(block: int, causal: bool) -> None:
    lengths = torch.tensor([0, 1, block - 1, block, block + 1, 2 * block + 3])
    offsets = offsets_from_lengths(lengths)
    total = int(offsets[-1]) + 1
    q, k, v = leaf(total, 2, 4, seed=1), leaf(total, 1, 4, seed=2), leaf(total, 1, 3, seed=3)
    ours = block_attention(q, k, v, offsets, max_length_q=512, block=block, causal=causal)
    truth = attention_loop(q, k, v, offsets, weigh=softmax_weights, scale=0.5, block=block, causal=causal)
    assert_same(ours, truth, [q, k, v])


def test_block_attention_rope_counts_positions_in_the_sequence() -> None:
    offsets = torch.tensor([0, 70, 75])
    q, k, v = leaf(75, 2, 4, seed=1), leaf(75, 2, 4, seed=2), leaf(75, 2, 4, seed=3)
    rope = Rope().tables(offsets, 4, total=75, dtype=torch.float64)
    ours = block_attention(q, k, v, offsets, max_length_q=128, rope=rope, qk_norm=True)
    turned_q, turned_k = (apply_rope(rms_norm(x), rope) for x in (q, k))
    truth = attention_loop(turned_q, turned_k, v, offsets, weigh=softmax_weights, scale=0.5, block=64)
    assert_same(ours, truth, [q, k, v])


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_seed_pool_equals_loops(activation: Any) -> None:
    args = make("shared")
    ours = seed_pool(
        args["q"], args["k"], args["v"], args["offsets_k"], max_length_k=64, scale=0.4, activation=activation
    )
    weigh = softmax_weights if activation is None else activation_weights(torch.nn.functional.gelu)
    truth = attention_loop(**without_bounds(args), weigh=weigh, scale=0.4)
    assert_same(ours, truth, [args["q"], args["k"], args["v"]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_keeps_the_dtype_and_computes_in_float32(kind: str, dtype: torch.dtype) -> None:
    args = make(kind)
    low = {name: x.detach().to(dtype) if name in "qkv" else x for name, x in args.items()}
    exact = {name: low[name].double() if name in "qkv" else x for name, x in args.items()}
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for ours, truth in (
        (flash_attention(**low, causal=True), flash_attention(**exact, causal=True)),
        (gdpa(**low, scale=0.3), gdpa(**exact, scale=0.3)),
    ):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), truth, rtol=tolerance, atol=tolerance)


def test_autocast_decides_the_dtype() -> None:
    x = torch.randn(5, 2, 4)
    offsets = torch.tensor([0, 5])
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attention(x, x.bfloat16(), x, offsets, max_length_q=8).dtype == torch.bfloat16
        assert gdpa(x, x, x, offsets, max_length_q=8, scale=1.0).dtype == torch.bfloat16
        assert block_attention(x, x, x, offsets, max_length_q=8).dtype == torch.bfloat16


def test_gradcheck_and_second_derivatives() -> None:
    offsets = torch.tensor([0, 2, 2, 5])
    q, k, v = leaf(6, 2, 4, seed=1), leaf(6, 1, 4, seed=2), leaf(6, 1, 3, seed=3)
    rope = Rope().tables(offsets, 4, total=6, dtype=torch.float64)

    def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, offsets, max_length_q=4, causal=True, qk_norm=True, rope=rope)

    def pointwise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdpa(q, k, v, offsets, max_length_q=4, scale=0.5, activation="gelu")

    for function in (softmax, pointwise):
        assert torch.autograd.gradcheck(function, (q, k, v))
        assert torch.autograd.gradgradcheck(function, (q, k, v))


@pytest.mark.parametrize("sequence", [1, 40])
def test_groups_are_split_without_changing_a_bit_of_meaning(sequence: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemworks.jagged import _packing

    offsets = offsets_from_lengths(torch.full((9,), sequence))
    x = leaf(int(offsets[-1]), 2, 4)
    whole = flash_attention(x, x, x, offsets, max_length_q=64)
    monkeypatch.setattr(_packing, "GROUP_PAIRS", 1)
    _packing._cached_host_plan.cache_clear()
    torch.testing.assert_close(flash_attention(x, x, x, offsets, max_length_q=64), whole, rtol=1e-12, atol=1e-12)
    _packing._cached_host_plan.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_has_gradients_in_every_dtype(dtype: torch.dtype) -> None:
    """Both tables, and q, k and v, against float64; in the dtypes that kernels take on a device."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 5, 5, 17])
    times = torch.randint(0, 500, (17,), generator=generator)
    exact = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double().requires_grad_()
        for shape in ((17, 2, 8), (17, 2, 8), (17, 2, 8), (7, 2), (6, 2))
    ]
    results = []
    for leaves in ([x.detach().to(dtype).requires_grad_() for x in exact], exact):
        q, k, v, position, time = leaves
        bias = AttentionBias(position, time, times, None, 10)
        out = flash_attention(q, k, v, offsets, max_length_q=16, bias=bias)
        d_out = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
        results.append(torch.autograd.grad(out, leaves, d_out))
    for ours, truth in zip(*results, strict=True):
        assert ours.abs().max() > 0
        assert (ours.double() - truth).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * truth.norm()
