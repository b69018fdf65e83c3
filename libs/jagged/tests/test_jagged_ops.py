"""The custom ops of attention on the CPU: explicit backward, opcheck, compilation, FLOP counts, schedule and table."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from gemworks.jagged import Jagged, TileSchedule, explain, flash_attention, gdpa, num_pairs, offsets_from_lengths
from gemworks.jagged.ops.attention_core import op, table
from gemworks.jagged.ops.gdpa.activations import ACTIVATIONS
from gemworks.jagged.testing import activation_weights, attention_loop, softmax_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.reference
LENGTHS_Q, LENGTHS_K = [3, 0, 17, 1, 8], [5, 4, 9, 0, 2]
FULL = op.UNBOUNDED
MASKS = {"full": (FULL, FULL, {}), "causal": (FULL, 0, {"causal": True}), "window": (2, 2, {"window": 3})}


def arguments(
    kind: str = "cross", activation: str = "softmax", mask: str = "full", dtype: torch.dtype = torch.float64
) -> tuple[Any, ...]:
    """Arguments of `attention_forward`, q, k and v being leaves."""
    torch.manual_seed(0)
    offsets_q, offsets_k = (offsets_from_lengths(torch.tensor(n)) for n in (LENGTHS_Q, LENGTHS_K))
    rows_q, rows_k = int(offsets_q[-1]) + 1, int(offsets_k[-1]) + 2
    rows_q, rows_k = {"self": (rows_q, rows_q), "fixed": (rows_q, 35), "shared": (6, rows_k)}.get(
        kind, (rows_q, rows_k)
    )
    q = torch.randn(rows_q, 4, 6, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(rows_k, 2, h, dtype=dtype, requires_grad=True) for h in (6, 5))
    left, right, _ = MASKS[mask]
    return (
        q, k, v, None if kind == "shared" else offsets_q, None if kind in ("self", "fixed") else offsets_k, [], "",
        len(LENGTHS_Q), 7 if kind == "fixed" else -1, 32, 16, 0.4, activation, left, right, "bottom_right",
        kind == "shared",
    )  # fmt: skip


def call(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    return torch.ops.gemworks_jagged.attention_forward(*args)


LAYOUTS = ["self", "cross", "fixed", "shared"]
CASES = [
    *itertools.product(["softmax", "silu"], LAYOUTS, MASKS),
    *((a, "cross", "full") for a in ACTIVATIONS if a != "silu"),
]


@pytest.mark.parametrize(("activation", "kind", "mask"), CASES)
def test_backward_formulas_equal_autograd_of_loops(activation: str, kind: str, mask: str) -> None:
    args = arguments(kind, activation, mask)
    q, k, v = args[:3]
    out, _ = call(args)
    weigh = softmax_weights if activation == "softmax" else activation_weights(ACTIVATIONS[activation])
    keys, values = (x.view(5, 7, *x.shape[1:]) if kind == "fixed" else x for x in (k, v))
    truth = attention_loop(
        q, keys, values, args[3], args[4], weigh=weigh, scale=0.4, shared_query=kind == "shared", **MASKS[mask][2]
    ).reshape(out.shape)
    torch.testing.assert_close(out, truth, rtol=1e-9, atol=1e-11)
    d_out = torch.randn_like(out)
    for ours, exact in zip(
        torch.autograd.grad(out, (q, k, v), d_out), torch.autograd.grad(truth, (q, k, v), d_out), strict=True
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("activation", ["softmax", "gelu"])
@pytest.mark.parametrize("kind", ["self", "cross", "fixed", "shared"])
def test_opcheck(kind: str, activation: str) -> None:
    args = arguments(kind, activation, dtype=torch.float32)
    torch.library.opcheck(op.attention_forward.overload, args)
    out, lse = (x.detach() for x in call(args))
    plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    torch.library.opcheck(op.attention_backward.overload, (torch.randn_like(out), *plain[:3], out, lse, *plain[3:]))


def test_opcheck_with_a_schedule() -> None:
    args = list(arguments("cross", dtype=torch.float32))
    schedule = TileSchedule.build(args[3], args[4], total_q=args[0].shape[0], total_k=args[1].shape[0])
    args[5], args[6] = list(schedule.tensors), schedule.heights
    torch.library.opcheck(op.attention_forward.overload, tuple(args))
    call(tuple(args))[0].sum().backward()


def test_float32_matches_float64_definition() -> None:
    """The public functions: float64 takes the definition, float32 the op."""
    args = arguments("cross")
    q, k, v, offsets_q, offsets_k = args[:5]
    bounds: dict[str, Any] = {"max_length_q": 32, "max_length_k": 16}
    functions: tuple[Any, ...] = (
        lambda q, k, v: flash_attention(q, k, v, offsets_q, offsets_k, causal=True, qk_norm=True, **bounds),
        lambda q, k, v: gdpa(q, k, v, offsets_q, offsets_k, scale=0.3, activation="fast_gelu", window=4, **bounds),
    )
    for function in functions:
        results = []
        for dtype in (torch.float64, torch.float32):
            leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
            out = function(*leaves)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for wide, narrow in zip(*results, strict=True):
            torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-4)


# Dynamo makes one itself when it traces an autograd.Function (rms norm in front of the op).
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_one_graph_for_every_total_j7_t2() -> None:
    """J7, T2: over batches of other totals and lengths nothing is compiled again, forward or backward."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    def step(x: Tensor, offsets: Tensor, schedule: TileSchedule) -> Tensor:
        y = flash_attention(x, x, x, offsets, max_length_q=64, causal=True, qk_norm=True, schedule=schedule)
        return gdpa(y, x, x, offsets, max_length_q=64, scale=0.5, schedule=schedule).sum()

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ([3, 0, 17], [30, 2, 5], [1, 1, 60]):
        j = Jagged.from_lengths(torch.randn(sum(lengths), 2, 4), torch.tensor(lengths), 64)
        x = j.values.requires_grad_()
        schedule = TileSchedule.build(j.offsets, total_q=j.total, heights="q128 k128")
        loss, truth = compiled(x, j.offsets, schedule), step(x, j.offsets, schedule)
        torch.testing.assert_close(loss, truth)
        torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(truth, x))
    assert counter.frame_count == 1


def test_aot_compiled_equals_eager_over_two_totals() -> None:
    compiled = torch.compile(
        lambda x, o: gdpa(x, x, x, o, max_length_q=64, scale=0.5), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for lengths in ([3, 0, 17], [30, 2, 5]):
        offsets = offsets_from_lengths(torch.tensor(lengths))
        x = torch.randn(sum(lengths), 2, 4, requires_grad=True)
        ours, truth = compiled(x, offsets), gdpa(x, x, x, offsets, max_length_q=64, scale=0.5)
        torch.testing.assert_close(ours, truth)
        torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(truth.sum(), x))


def test_export_and_checkpointing() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
            return flash_attention(x, x, x, offsets, max_length_q=32)

    x, offsets = torch.randn(20, 2, 4, requires_grad=True), torch.tensor([0, 12, 20])
    program = torch.export.export(Layer(), (x.detach(), offsets))
    assert "gemworks_jagged.attention_forward" in str(program.graph)
    torch.testing.assert_close(program.module()(x, offsets), Layer()(x, offsets))
    kept = checkpoint(Layer(), x, offsets, use_reentrant=False)
    plain = torch.autograd.grad(Layer()(x, offsets).square().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(kept.square().sum(), x), plain)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["self", "cross", "fixed", "shared"])
def test_flops_are_those_of_the_admitted_pairs(kind: str, mask: str) -> None:
    args = arguments(kind, "softmax", mask, dtype=torch.float32)
    lengths_q = torch.tensor(LENGTHS_Q) if kind != "shared" else torch.full((5,), 6)
    lengths_k = {"self": lengths_q, "fixed": torch.full((5,), 7)}.get(kind, torch.tensor(LENGTHS_K))
    pairs = int(num_pairs(lengths_q, lengths_k, **MASKS[mask][2]))
    with FlopCounterMode(display=False) as counter:
        call(args)[0].sum().backward()
    counts = {str(name).split(".")[-1]: n for name, n in counter.get_flop_counts()["Global"].items()}
    assert counts == {
        "attention_forward": 2 * pairs * 4 * (6 + 5),
        "attention_backward": 2 * pairs * 4 * (3 * 6 + 2 * 5),
    }


def test_flops_of_fake_tensors_come_from_the_bounds() -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q, offsets = torch.empty(100, 2, 8), torch.empty(5, dtype=torch.int64)
        gdpa(q, q, q, offsets, max_length_q=25, scale=1.0)
        assert counter.get_total_flops() == 4 * 100 * 25 * 2 * 8
        flash_attention(q, q, q, offsets, max_length_q=25, window=2)
    assert counter.get_total_flops() == 4 * 100 * (25 + 3) * 2 * 8


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(*[st.sampled_from([0, 1, 31, 32, 33, 127, 128, 129, 700])] * 2), max_size=6),
    past_end=st.sampled_from([0, 1, 40]),
    height=st.sampled_from(["q32", "k32", "q128", "k128", "q192"]),
)
def test_schedule_covers_every_row_once(lengths: list[tuple[int, int]], past_end: int, height: str) -> None:
    offsets = [offsets_from_lengths(torch.tensor([n[i] for n in lengths], dtype=torch.int64)) for i in (0, 1)]
    totals = [int(o[-1]) + past_end for o in offsets]
    schedule = TileSchedule.build(*offsets, total_q=totals[0], total_k=totals[1], heights=height)
    tiles = schedule.tiles(height)
    assert tiles is not None
    side, rows = (0, int(height[1:])) if height[0] == "q" else (1, int(height[1:]))
    bounds = schedule.bounds[0 if side == 0 else 2].tolist()
    other = schedule.bounds[3 if side == 0 else 1].diff().tolist()
    count = int(tiles[2, 0])
    assert count <= tiles.shape[1]
    covered = [0] * totals[side]
    costs = []
    for sample, row in zip(*tiles[:2, :count].tolist(), strict=True):
        begin, end = bounds[sample] + row, min(bounds[sample] + row + rows, bounds[sample + 1])
        assert begin < end, "an empty tile"
        costs.append(other[sample])
        for r in range(begin, end):
            covered[r] += 1
    assert covered == [1] * totals[side]
    assert costs == sorted(costs, reverse=True)


def test_schedule_mistakes() -> None:
    offsets = torch.tensor([0, 3])
    with pytest.raises(ValueError, match="heights: got 'x64'"):
        TileSchedule.build(offsets, total_q=3, heights="x64")
    with pytest.raises(ValueError, match="offsets_q, offsets_k: got neither"):
        TileSchedule.build(None, total_q=3)
    with pytest.raises(ValueError, match="there are only 2 rows"):
        TileSchedule.build(offsets, total_q=2)


def test_every_supported_call_has_a_configuration() -> None:
    dims = (16, 32, 64, 96, 128, 256)
    for step, activation, dtype, width, masked, grouped, place in itertools.product(
        table.STEPS, ("softmax", "gelu"), table.TRITON_DTYPES, dims, (False, True), (False, True), ("sm_80", "sm_90")
    ):
        shape = table.Shape(activation, dtype, width, width, masked, False, grouped, 1024)
        config = table.choose(step, shape, place)
        assert config is not None
        is_gluon = isinstance(config, table.GluonConfig)
        assert is_gluon == (table.gluon_refusal(step, shape, place) is None)
        assert not (is_gluon and masked and step != "forward")
    shape = table.Shape("softmax", torch.float64, 64, 64, False, False, False, 8)
    assert table.choose("forward", shape, "sm_90") is None
    assert table.choose("forward", dataclasses.replace(shape, dtype=torch.float16), "sm_75") is None


def test_narrow_heads_have_entries_of_their_own() -> None:
    """Heads of 64 with the same lengths take them; wider heads and longer keys do not."""
    for (step, kind, lengths), config in table.GLUON_NARROW.items():
        activation = "softmax" if kind == "softmax" else "gelu"
        bound, rows = (256, 0) if lengths == "short" else (1024, 0)
        shape = table.Shape(activation, torch.bfloat16, 64, 64, False, False, False, bound, rows)
        assert shape.lengths == lengths
        assert table.choose(step, shape, "sm_90") == config
        wide = dataclasses.replace(shape, head_dim=128, value_dim=128)
        assert table.choose(step, wide, "sm_90") == table.GLUON[step, kind, lengths] != config
        long = dataclasses.replace(shape, max_length_k=1024)
        assert table.choose(step, long, "sm_90") == table.GLUON[step, kind, "long"]


def test_choice_is_constant_within_a_length_bucket_t1() -> None:
    """T1: only the bucketed bound enters, and only as short or long keys."""
    shape = table.Shape("gelu", torch.bfloat16, 128, 128, False, False, False, 512)
    for bound in (1024, 2048, 16384):
        other = dataclasses.replace(shape, max_length_k=bound)
        assert [table.choose(s, shape, "sm_90") for s in table.STEPS] == [
            table.choose(s, other, "sm_90") for s in table.STEPS
        ]


@pytest.mark.parametrize(("options", "match"), [({"chained": True}, "chained=True"), ({"groups": 1}, "groups=1")])
def test_turns_that_no_kernel_takes_are_refused(options: dict[str, Any], match: str) -> None:
    shipped = table.GLUON["forward", "activation", "long"]
    assert dataclasses.replace(shipped, in_turn=True).in_turn
    with pytest.raises(ValueError, match=f"in_turn: got True with {match}"):
        dataclasses.replace(shipped, in_turn=True, **options)


def test_explain_names_the_features_that_decide() -> None:
    def told(**kwargs: Any) -> str:
        return str(explain("flash_attention", architecture="sm_90", **kwargs))

    assert told(head_dim=128).startswith("flash_attention: gluon")
    assert told(head_dim=128, features=("masked",)).startswith("flash_attention: gluon")
    assert "no mask with a shared query" in told(head_dim=128, features=("masked", "shared_query"))
    assert told(head_dim=96).startswith("flash_attention: triton")
    assert told(head_dim=64, features=("bias",)).startswith("flash_attention: triton (gluon has no bias")
    assert "qk_norm and rope run before it" in told(head_dim=64, features=("qk_norm", "rope"))
    assert told(head_dim=64, dtype=torch.float32).startswith("flash_attention: triton")
    with pytest.raises(ValueError, match="features: got mask"):
        told(features=("mask",))
