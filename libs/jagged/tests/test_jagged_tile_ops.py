"""The custom ops of norms and block attention on the CPU: formulas, gradients, registration, compilation, FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import (
    BlockSchedule,
    Rope,
    block_attention,
    block_attention_qkv,
    layer_norm,
    num_pairs,
    offsets_from_lengths,
    rms_norm,
)
from gemworks.jagged.ops.block_attention.custom_op import block_attention_op, block_attention_qkv_op
from gemworks.jagged.ops.block_attention.reference import block_offsets
from gemworks.jagged.ops.norms.custom_op import norm_backward_op, norm_op
from torch import Tensor

pytestmark = pytest.mark.reference

LENGTHS = torch.tensor([0, 1, 63, 0, 64, 65, 133])


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def block_inputs(
    *, heads: int, key_heads: int, rope: bool, dtype: torch.dtype = torch.float64, lengths: Tensor = LENGTHS
) -> tuple[Tensor, BlockSchedule, Any]:
    offsets = offsets_from_lengths(lengths)
    total = int(offsets[-1]) + 2
    qkv = random(total, heads + 2 * key_heads, 8, seed=1, dtype=dtype).requires_grad_()
    tables = (
        Rope(time_fraction=0.5).tables(offsets, 8, total=total, dt=torch.rand(total), dtype=dtype) if rope else None
    )
    return qkv, BlockSchedule.make(offsets, total=total), tables


@pytest.mark.parametrize("shape", [(5, 7), (3, 2, 8), (7,), (0, 4)], ids=str)
@pytest.mark.parametrize("full", [True, False], ids=["affine_residual_add", "plain"])
@pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
def test_norm_op_equals_the_public_function(center: bool, full: bool, shape: tuple[int, ...]) -> None:
    x, r, a, dy, dh = (random(*shape, seed=i) for i in range(5))
    leaves = {"x": x}
    if full:
        leaves |= {"residual": r, "add": a, "weight": random(shape[-1], seed=6)}
        if center:
            leaves["bias"] = random(shape[-1], seed=7)
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    public: Any = layer_norm if center else rms_norm
    expected = public(**leaves, eps=1e-5)
    get = leaves.get
    y, h = norm_op(x, get("weight"), get("bias"), get("residual"), get("add"), 1e-5, center)
    outs, truths, cotangents = [y], [expected], [dy]
    if full:
        outs, truths, cotangents = [y, h], list(expected), [dy, dh]
    for out, truth in zip(outs, truths, strict=True):
        torch.testing.assert_close(out, truth)
    got = torch.autograd.grad(outs, list(leaves.values()), cotangents)
    for g, e in zip(got, torch.autograd.grad(truths, list(leaves.values()), cotangents), strict=True):
        torch.testing.assert_close(g, e)


def test_only_the_new_stream_is_used() -> None:
    """h alone has a gradient: it goes to x and residual as it is."""
    x, r = random(4, 6, seed=1).requires_grad_(), random(4, 6, seed=2).requires_grad_()
    _, h = norm_op(x, None, None, r, None, 1e-5, True)
    dh = random(4, 6, seed=3)
    for g in torch.autograd.grad(h, [x, r], dh):
        torch.testing.assert_close(g, dh)


def test_gradients_come_in_the_dtype_of_each_argument() -> None:
    x = random(4, 6, seed=1, dtype=torch.bfloat16).requires_grad_()
    r, a = (random(4, 6, seed=i, dtype=torch.float32).requires_grad_() for i in (2, 3))
    w = random(6, seed=4, dtype=torch.float32).requires_grad_()
    y, h = norm_op(x, w, None, r, a, 1e-5, False)
    (y.sum() + h.sum()).backward()
    for leaf in (x, r, a, w):
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize(
    "settings", [(64, False, False, 1e-6), (32, True, True, 1e-6), (128, False, True, 1e-2)], ids=str
)
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (4, 2)])
def test_block_op_equals_the_public_function(
    heads: int, key_heads: int, settings: tuple[int, bool, bool, float], rope: bool
) -> None:
    """J1, J4: with empty sequences and rows past the end."""
    qkv, _, tables = block_inputs(heads=heads, key_heads=key_heads, rope=rope)
    block, causal, qk_norm, eps = settings
    offsets = offsets_from_lengths(LENGTHS)
    table = BlockSchedule.make(offsets, total=qkv.shape[0], block=block).table_S3
    expected = block_attention_qkv(
        qkv, offsets, num_heads=heads, max_length=133, scale=0.3, block=block, causal=causal, rope=tables,
        qk_norm=qk_norm, qk_norm_eps=eps,
    )  # fmt: skip
    cos, sin = (None, None) if tables is None else (tables.cos_TJ, tables.sin_TJ)
    q, k, v = qkv.split([heads, key_heads, key_heads], dim=1)
    dout = random(*expected.shape, seed=2)
    (truth,) = torch.autograd.grad(expected, qkv, dout)
    for out in (
        block_attention_qkv_op(qkv, heads, table, cos, sin, 0.3, *settings),
        block_attention_op(q, k, v, table, cos, sin, 0.3, *settings),
    ):
        torch.testing.assert_close(out, expected)
        assert not out[-2:].any()
        torch.testing.assert_close(torch.autograd.grad(out, qkv, dout)[0], truth)


def test_ops_are_registered_soundly() -> None:
    x, w = random(4, 8, seed=1).requires_grad_(), random(8, seed=2).requires_grad_()
    for args in ((x, w, w, x, x, 1e-5, True), (x, None, None, None, None, 1e-6, False)):
        torch.library.opcheck(norm_op.overload, args)
    torch.library.opcheck(
        norm_backward_op.overload, (x.detach(), None, x.detach(), w.detach(), torch.float32, 1e-5, True, None)
    )
    qkv, schedule, tables = block_inputs(heads=2, key_heads=1, rope=True)
    q, k, v = (part.detach().clone().requires_grad_() for part in qkv.split([2, 1, 1], dim=1))
    settings = (0.3, 64, False, True, 1e-6)
    torch.library.opcheck(
        block_attention_op.overload, (q, k, v, schedule.table_S3, tables.cos_TJ, tables.sin_TJ, *settings)
    )
    torch.library.opcheck(block_attention_op.overload, (q, k, v, schedule.table_S3, None, None, *settings))
    torch.library.opcheck(block_attention_qkv_op.overload, (qkv, 2, schedule.table_S3, None, None, *settings))


def test_one_graph_for_every_total_j7_t2() -> None:
    """J7, T2: norm, block attention and their backward compile whole; a new total is no new graph."""
    graphs = 0

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    def layer(qkv: Tensor, offsets: Tensor) -> Tensor:
        table = BlockSchedule.make(offsets, total=qkv.shape[0]).table_S3
        normed, stream = norm_op(qkv, None, None, qkv, None, 1e-6, False)
        out = block_attention_qkv_op(normed, 2, table, None, None, 0.3, 64, False, True, 1e-6)
        return out + stream[:, :2]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for lengths in ([3, 70, 0], [100, 64, 1], [9, 9, 200]):
        offsets = offsets_from_lengths(torch.tensor(lengths))
        qkv = random(int(offsets[-1]), 4, 8, seed=1, dtype=torch.float32).requires_grad_()
        out, expected = compiled(qkv, offsets), layer(qkv, offsets)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(*(torch.autograd.grad(o.sum(), qkv) for o in (out, expected)))
    assert graphs == 1


def test_the_path_of_a_gpu_compiles_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions as they run on CUDA, checks and schedule included, on the ops' CPU kernels."""
    qkv, _, tables = block_inputs(heads=2, key_heads=1, rope=True, dtype=torch.float32)
    offsets = offsets_from_lengths(LENGTHS)

    def layer(qkv: Tensor, offsets: Tensor) -> Tensor:
        q, k, v = qkv.split([2, 1, 1], dim=1)
        kwargs: Any = {"qk_norm": True, "rope": tables}
        apart = block_attention(q, k, v, offsets, max_length_q=200, **kwargs)
        return apart + block_attention_qkv(qkv, offsets, num_heads=2, max_length=200, **kwargs)

    expected = layer(qkv, offsets)
    (truth,) = torch.autograd.grad(expected.square().sum(), qkv)
    monkeypatch.setattr("gemworks.jagged.ops.block_attention.op.has_kernel", lambda *_: True)
    for call in (layer, torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")):
        out = call(qkv, offsets)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), qkv)[0], truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_flops_count_admitted_pairs_l3(causal: bool) -> None:
    """L3: exact where the table is on the host; backward counts 2.5 times as much, as torch's attention does."""
    from torch.utils.flop_counter import FlopCounterMode

    qkv, schedule, _ = block_inputs(heads=4, key_heads=2, rope=False)
    pairs = int(num_pairs(LENGTHS, block=64, causal=causal))
    with FlopCounterMode(display=False) as counter:
        out = block_attention_qkv_op(qkv, 4, schedule.table_S3, None, None, 0.3, 64, causal, False, 1e-6)
    assert counter.get_total_flops() == 2 * pairs * 4 * (8 + 8)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * pairs * 4 * (8 + 8)
    with FlopCounterMode(display=False) as counter:
        norm_op(qkv, None, None, None, None, 1e-6, False)
    assert counter.get_total_flops() == 0


@pytest.mark.parametrize("device", ["meta"])
def test_flops_without_values(device: str) -> None:
    """On fake or meta tensors: as if every row were in a full block."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.empty(640, 2, 16, device=device) for _ in range(3))
    table = torch.empty(14, 3, dtype=torch.int32, device=device)
    with FlopCounterMode(display=False) as counter:
        out = block_attention_op(q, k, v, table, None, None, 0.3, 64, False, False, 1e-6)
    assert out.shape == (640, 2, 16)
    assert counter.get_total_flops() == 2 * 640 * 64 * 2 * 32


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 5], [64, 1, 0, 200], [127, 128, 129], [1] * 40], ids=str)
@pytest.mark.parametrize("tail", [0, 1, 300])
def test_schedule_covers_every_row_once_j6(lengths: list[int], tail: int, block: int) -> None:
    """J6: blocks as `block_offsets` cuts them; every packed row, past the end too, is written exactly once."""
    offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
    used = int(offsets[-1])
    table = BlockSchedule.make(offsets, total=used + tail, block=block).table_S3
    assert table.shape[0] == (used + tail) // block + len(lengths) + 1
    writes = torch.zeros(used + tail, dtype=torch.int64)
    for start, _, stored in table.tolist():
        writes[start : start + stored] += 1
    assert bool((writes == 1).all())
    attending = table[table[:, 1] > 0]
    cut = block_offsets(offsets, block, used)
    assert attending[:, 0].tolist() == cut[:-1].tolist()
    assert attending[:, 1].tolist() == cut.diff().tolist()


def test_schedule_mistakes_say_how_to_mend_them() -> None:
    offsets = torch.tensor([0, 5])
    x = torch.zeros(5, 1, 8)
    with pytest.raises(ValueError, match="block: got 16"):
        BlockSchedule.make(offsets, total=5, block=16)
    schedule = BlockSchedule.make(offsets, total=5, block=32)
    with pytest.raises(ValueError, match=r"schedule: got total 5, block 32 .* expected total 5, block 64"):
        block_attention(x, x, x, offsets, max_length_q=5, schedule=schedule)
    with pytest.raises(ValueError, match=r"qkv: got shape \(5, 4, 8\) with num_heads 1, expected \[T, N \+ 2 M, H\]"):
        block_attention_qkv(torch.zeros(5, 4, 8), offsets, num_heads=1, max_length=5)
    with pytest.raises(ValueError, match="max_length_q: missing"):
        block_attention_qkv(torch.zeros(5, 3, 8), offsets, num_heads=1)
