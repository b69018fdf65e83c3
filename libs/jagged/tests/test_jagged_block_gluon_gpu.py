"""The Gluon kernels of block attention on a GPU against their plain Triton twin, and against themselves again."""

from __future__ import annotations

import pytest
import torch
from gemworks.jagged import BlockSchedule, Rope, offsets_from_lengths
from gemworks.jagged.ops.block_attention.formulas import BlockArgs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]
NAN = float("nan")
FRONTS = [(False, None), (False, torch.float16), (True, None), (True, torch.float32)]


# Every front with and without a mask at the main shape; the others, which share its code, with one of each.
CASES = [
    *((64, 128, *front, causal, torch.bfloat16) for front in FRONTS for causal in (False, True)),
    *((64, 128, *front, i == 3, torch.float16) for i, front in enumerate(FRONTS) if i % 2),
    *(
        (*shape, *front, i % 2 == 1, torch.bfloat16)
        for shape in ((64, 64), (128, 128))
        for i, front in enumerate(FRONTS)
    ),
]


@pytest.mark.parametrize(("block", "width", "norm", "rope", "causal", "dtype"), CASES)
def test_gluon_equals_its_twin(
    block: int, width: int, norm: bool, rope: torch.dtype | None, causal: bool, dtype: torch.dtype
) -> None:
    """Outputs poisoned, garbage past the end, views of one projection; bit-equal repeats (D1)."""
    from gemworks.jagged.ops.block_attention import launch

    lengths = torch.tensor([0, 1, block - 1, block, block + 1, 0, 5 * block + 7, 1, 3000, 0])
    offsets = offsets_from_lengths(lengths).cuda()
    used = int(lengths.sum())
    total = used + 70
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(total, 12, width, device="cuda", generator=generator).to(dtype)
    dout = torch.randn(total, 4, width, device="cuda", generator=generator).to(dtype)
    qkv[used:], dout[used:] = NAN, NAN
    q, k, v = qkv.split(4, dim=1)
    cos = sin = None
    if rope is not None:
        tables = Rope(time_fraction=0.0).tables(offsets, width, total=total)
        cos, sin = tables.cos_TJ.to(rope), tables.sin_TJ.to(rope)
    table = BlockSchedule.make(offsets, total=total, block=block).table_S3
    args = BlockArgs(table, cos, sin, width**-0.5, block, causal, norm, 1e-6)
    assert launch.gluon_takes(args, q, k, v, dout)
    plain = {
        direction: launch.block_config(block, direction, dtype=dtype, group=1, rope=rope is not None, qk_norm=norm)  # pyright: ignore[reportArgumentType]
        for direction in ("forward", "backward")
    }
    results = []
    for configs in (plain, {d: launch.gluon_config(block, d) for d in plain}, None):  # pyright: ignore[reportArgumentType]
        configs = configs or {d: launch.gluon_config(block, d) for d in plain}  # pyright: ignore[reportArgumentType]
        out, grad = torch.full_like(dout, NAN), torch.full_like(qkv, NAN)
        launch.block_attention_forward(q, k, v, args, out=out, config=configs["forward"])
        dq, dk, dv = grad.split(4, dim=1)
        launch.block_attention_backward(dout, q, k, v, dq, dk, dv, args, config=configs["backward"])
        results.append((out, dq, dk, dv))
    for name, twin, got, again in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert got.isfinite().all(), name
        assert torch.equal(got, again), name
        assert not got[used:].any(), name
        error = float((got.float() - twin.float()).norm() / twin.float().norm())
        assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), f"{name}: {error:.1e}"
