"""Attention's backward that ends in that of k's norm and rotation, on a GPU: beside float64, its twin, two passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import (
    Rope,
    RopeTables,
    apply_rope,
    flash_attention,
    flash_attention_pool,
    flash_attention_qkv,
    offsets_from_lengths,
    rms_norm,
)
from gemworks.jagged.dispatch import architecture_of
from gemworks.jagged.ops.attention_core import op, table
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 700, 2]
HEADS = 4
# Of the packed gradient's norm; as for the pass of its own in test_jagged_rope_kernels.py.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        out = empty(*size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


def projection(heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, heads, width] whose last rows belong to nobody and hold NaN; offsets."""
    offsets = offsets_from_lengths(torch.tensor(LENGTHS)).cuda()
    x = torch.randn(int(offsets[-1]) + 5, heads, width, device="cuda", dtype=dtype)
    x[int(offsets[-1]) :] = float("nan")
    return x, offsets


def attend(kind: str, x: Tensor, q: Tensor, offsets: Tensor, backward_epilogue: bool, **options: Any) -> Tensor:
    norm = options.pop("norm", True)
    if kind == "pool":
        return flash_attention_pool(
            q, x, offsets, max_length=1024, k_norm=norm, backward_epilogue=backward_epilogue, **options
        )
    return flash_attention_qkv(
        x, offsets, num_heads=q.shape[1], max_length=1024, qk_norm=norm, backward_epilogue=backward_epilogue, **options
    )


def parts_apart(kind: str, x: Tensor, q: Tensor, offsets: Tensor, norm: bool, rope: Any, window: Any) -> Tensor:
    """The same by `flash_attention` of the parts; in float64 on the host this is the reference."""
    if kind == "pool":
        k, v = x.chunk(2, dim=1)
        k = rms_norm(k, eps=1e-6) if norm else k
        k = k if rope is None else apply_rope(k, rope)
        return flash_attention(q, k, v, None, offsets, max_length_k=1024, shared_query=True)
    keys = (x.shape[1] - q.shape[1]) // 2
    q, k, v = x.split([q.shape[1], keys, keys], dim=1)
    return flash_attention(q, k, v, offsets, max_length_q=1024, qk_norm=norm, rope=rope, window=window)


# kind, head width, dtype, norm, dtype of the rotation's tables, window
HALF, FULL = torch.float16, torch.float32
CALLS = [
    *((kind, 128, torch.bfloat16, True, FULL, None) for kind in ("self", "pool")),
    *((kind, 128, torch.bfloat16, True, HALF, None) for kind in ("self", "pool")),
    *((kind, 128, torch.bfloat16, True, None, None) for kind in ("self", "pool")),
    *((kind, 128, torch.bfloat16, False, FULL, None) for kind in ("self", "pool")),
    *((kind, 128, torch.float16, True, FULL, None) for kind in ("self", "pool")),
    ("self", 128, torch.bfloat16, True, FULL, 50),
    *((kind, 64, torch.float32, True, FULL, None) for kind in ("self", "pool")),  # plain Triton
    ("self", 64, torch.bfloat16, True, FULL, None),  # the pair of Gluon kernels: a pass of its own
]


@pytest.mark.parametrize(("kind", "width", "dtype", "norm", "turn", "window"), CALLS)
def test_gradients_against_float64(
    kind: str, width: int, dtype: torch.dtype, norm: bool, turn: torch.dtype | None, window: int | None
) -> None:
    """Within the bound of the pass of its own, and no worse than it; bit-equal repeats; values are the same bits."""
    torch.manual_seed(0)
    x, offsets = projection((2 if kind == "pool" else 3) * HEADS, width, dtype)
    q = torch.randn(256, HEADS, width, device="cuda", dtype=dtype)
    rope = None if turn is None else Rope().tables(offsets, width, total=x.shape[0], dtype=turn)
    options: dict[str, Any] = {"norm": norm, "rope": rope}
    if kind == "self":
        options["window"] = window
    results = []
    for backward_epilogue in (False, True, True):
        leaf = x.clone().requires_grad_()
        out = attend(kind, leaf, q, offsets, backward_epilogue, **options)
        d_out = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(dtype)
        results.append((out.detach(), *torch.autograd.grad(out, leaf, d_out)))
    (apart_out, apart), (out, ours), again = results
    assert torch.equal(out, apart_out)
    assert torch.equal(ours, again[1])
    exact = x.double().cpu().nan_to_num().requires_grad_()
    wide = None if rope is None else RopeTables(rope.cos_TJ.double().cpu(), rope.sin_TJ.double().cpu())
    expected = parts_apart(kind, exact, q.double().cpu(), offsets.cpu(), norm, wide, window)
    (truth,) = torch.autograd.grad(expected, exact, d_out.double().cpu().view(expected.shape))
    bound = TOLERANCE[dtype]

    def error(grad: Tensor, heads: slice) -> float:
        found = grad.double().cpu()[:, heads]
        assert found.isfinite().all()
        return float((found - truth[:, heads]).norm() / truth[:, heads].norm())

    keys = slice(0, HEADS) if kind == "pool" else slice(HEADS, 2 * HEADS)
    assert error(ours, slice(None)) < bound
    assert error(ours, keys) < bound
    assert error(ours, keys) < 1.1 * error(apart, keys) + 1e-6  # one rounding of the gradient fewer, one of y more
    assert ours[int(offsets[-1]) :].eq(0).all()


@pytest.mark.parametrize("kind", ["self", "shared"])
@pytest.mark.parametrize("mask", [(op.UNBOUNDED, op.UNBOUNDED), (op.UNBOUNDED, 0)])
def test_the_fused_kernel_agrees_with_its_plain_twin(kind: str, mask: tuple[int, int]) -> None:
    from gemworks.jagged.ops.attention_core import launch, launch_hopper
    from gemworks.jagged.ops.rope.launch import norm_rope

    if architecture_of(torch.device("cuda")) != "sm_90":
        pytest.skip("the fused kernel runs on sm_90")
    shared = kind == "shared"
    if shared and mask[1] == 0:
        pytest.skip("no mask with a shared query")
    torch.manual_seed(0)
    x, offsets = projection(3 * HEADS, 128, torch.bfloat16)
    q = torch.randn(130, HEADS, 128, device="cuda", dtype=torch.bfloat16) if shared else x[:, :HEADS].nan_to_num()
    rope = Rope().tables(offsets, 128, total=x.shape[0])
    scales = torch.empty(x.shape[0], HEADS, device="cuda")
    k = norm_rope(x[:, HEADS : 2 * HEADS], rope.cos_TJ, rope.sin_TJ, offsets[-1:], 1e-6, scales=scales)
    v = x[:, 2 * HEADS :]
    settings = op.Settings(
        None if shared else offsets, offsets if shared else None, [], "", len(LENGTHS), -1, 0 if shared else 1024, 1024,
        0.09, "softmax", *mask, "bottom_right", shared,
    )  # fmt: skip
    p = op.make_problem(q, k, v, op.Call(q, k, settings), "sm_90")
    out, lse = launch.forward(p)
    d_out = torch.randn_like(out)
    delta = launch.compute_delta(out, d_out)
    keys = launch.NormRope(rope.cos_TJ, rope.sin_TJ, scales)
    dq = torch.empty(p.rows_q, HEADS, 128, device="cuda", dtype=torch.float32 if shared else torch.bfloat16)
    found = []
    for fused in (True, False):
        dk, dv = torch.empty_like(k), torch.empty_like(k)
        if fused:
            config = table.choose_fused(p.shape, "sm_90")
            assert config is not None
            launch_hopper.backward_fused(p, d_out, lse, delta, dq, dk, dv, config, keys)
        else:
            config = table.triton_config("backward_kv", p.shape)
            launch.triton_backward_kv(p, d_out, lse, delta, dk, dv, config, keys)
        found.append((dk, dv))
    for ours, twin in zip(*found, strict=True):
        assert ours.isfinite().all()
        assert (ours.float() - twin.float()).norm() / twin.float().norm() < 5e-3
