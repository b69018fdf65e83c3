"""Every launch of a Gluon kernel gives each of its parameters a value: a missing one shows on a GPU only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import offsets_from_lengths
from gemworks.jagged._dense import Mask
from gemworks.jagged.ops.attention_core import table
from gemworks.jagged.ops.attention_core.reference import Rule
from gemworks.jagged.schedule import TileSchedule

pytestmark = pytest.mark.compile
OPTIONS = {"num_warps", "num_stages", "maxnreg"}


class Recorder:
    """Stands in for a kernel: binds the arguments to its parameters instead of running it."""

    def __init__(self, kernel: Any) -> None:
        self.names, self.calls = list(kernel.arg_names), 0

    def __getitem__(self, _grid: Any) -> Any:
        return self.bind

    def bind(self, *args: Any, **kwargs: Any) -> None:
        given = [*self.names[: len(args)], *(k for k in kwargs if k not in OPTIONS)]
        assert sorted(given) == sorted(self.names)
        self.calls += 1


def test_one_descriptor_reaches_every_row_of_every_sequence() -> None:
    """The sum of the coordinates of `load_rows` names the row, and a box ends where its sequence does."""
    pytest.importorskip("triton")
    from gemworks.jagged.ops.attention_core import launch_hopper

    generator = torch.Generator().manual_seed(0)
    for heads, width, gap in ((1, 64, 0), (4, 128, 0), (3, 128, 2)):
        fused = torch.zeros(50, heads * (1 + gap), width, dtype=torch.bfloat16)
        x = fused[:, :: 1 + gap] if gap else fused
        d = launch_hopper.ragged(launch_hopper.streamable(x), 64)
        assert d.base.data_ptr() == x.data_ptr(), "no copy"
        for begin, length, row in torch.randint(0, 1 << 29, (200, 3), generator=generator).tolist():
            at = (1 << 30, begin + length, (1 << 30) - length + row, heads - 1, 0)
            assert all(0 <= c < n for c, n in zip((*at[:2], *at[3:]), (*d.shape[:2], *d.shape[3:]), strict=True))
            assert (at[2] < d.shape[2]) == (row < length)  # past the end: zeros
            address = 2 * sum(c * s for c, s in zip(at, d.strides, strict=True)) % (1 << 64)
            assert address == 2 * ((begin + row) * x.stride(0) + (heads - 1) * x.stride(1)) % (1 << 64)
        assert all(0 <= 2 * s < 1 << 40 and 2 * s % 16 == 0 for s in d.strides[:-1])
    empty = launch_hopper.ragged(x[:0], 64)
    assert empty.base.numel() > 0


@pytest.mark.parametrize("mask", [Mask(), Mask(right=0)], ids=["full", "causal"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("activation", ["softmax", "fast_gelu"])
def test_launches_give_every_parameter(
    activation: str, shared: bool, mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from gemworks.jagged.ops.attention_core import launch, launch_hopper

    names = [n for n in vars(launch_hopper) if n.endswith("_kernel")]
    kernels = {n: Recorder(getattr(launch_hopper, n)) for n in names}
    for name, kernel in kernels.items():
        monkeypatch.setattr(launch_hopper, name, kernel)
    monkeypatch.setattr(launch_hopper, "num_multiprocessors", lambda _: 2)
    x = torch.zeros(40, 2, 128, dtype=torch.bfloat16)
    q = x[:9].clone() if shared else x
    offsets = offsets_from_lengths(torch.tensor([17, 23]))
    rows_q = 18 if shared else 40
    schedule = TileSchedule.build(
        None if shared else offsets, offsets if shared else None, total_q=q.shape[0], total_k=40 if shared else None
    )
    rule = Rule(0.1, activation, mask, shared)
    p = launch.Problem(q, x, x, rule, schedule, 1024, "sm_90", rows_q, None)
    out = x.new_zeros(rows_q, 2, 128)
    lse = torch.zeros(2, rows_q)
    dq = torch.zeros(rows_q, 2, 128, dtype=torch.float32 if shared else x.dtype)
    for (step, _, _), config in (*table.GLUON.items(), *table.GLUON_NARROW.items()):
        if step == "forward":
            launch_hopper.forward(p, out, lse, config)
        elif step == "backward_kv":
            launch_hopper.backward_kv(p, out, lse, lse, x.clone(), x.clone(), config)
        else:
            launch_hopper.backward_q(p, out, lse, lse, dq, config)
    for config in table.FUSED.values():
        launch_hopper.backward_fused(p, out, lse, lse, dq, x.clone(), x.clone(), config)
    assert all(k.calls for k in kernels.values())


def test_epilogue_launch_gives_every_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from gemworks.jagged.ops.attention_core import launch
    from gemworks.jagged.ops.gdpa import launch_epilogue
    from gemworks.jagged.ops.gdpa.kernel_epilogue_hopper import gdpa_norm_hopper_kernel

    kernel = Recorder(gdpa_norm_hopper_kernel)
    monkeypatch.setattr(launch_epilogue, "_hopper", lambda: kernel)
    monkeypatch.setattr(launch_epilogue, "num_multiprocessors", lambda _: 2)
    q, k = torch.zeros(40, 2, 128, dtype=torch.bfloat16), torch.zeros(128, 2, 128, dtype=torch.bfloat16)
    schedule = TileSchedule.build(offsets_from_lengths(torch.tensor([17, 23])), total_q=40, rows_k=64)
    p = launch.Problem(q, k, k, Rule(0.1, "fast_gelu", Mask(), False), schedule, 64, "sm_90", 40, 64)
    launch_epilogue.forward(p, launch_epilogue.NormArgs(q, None, None, q[0].flatten(), 1e-6, True))
    assert kernel.calls == 1

    from gemworks.jagged.ops.gdpa import epilogue

    monkeypatch.setattr(epilogue, "architecture_of", lambda _: "sm_90")
    full, offsets = epilogue.op.UNBOUNDED, offsets_from_lengths(torch.tensor([17, 23]))
    call = (offsets, None, [], "", 2, 64, 23, 64, 0.1, "fast_gelu", full, full, "bottom_right", False)
    y, h = epilogue.on_a_gpu(q, k, k, *call, q, q, None, None, 1e-6, False)
    assert y.shape == h.shape == q.shape
    assert kernel.calls == 2


def test_block_launches_give_every_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from gemworks.jagged.ops.block_attention import kernel_block_hopper, launch
    from gemworks.jagged.ops.block_attention.formulas import BlockArgs

    kernels = [Recorder(getattr(kernel_block_hopper, f"block_{n}_hopper_kernel")) for n in ("fwd", "bwd")]
    monkeypatch.setattr(launch, "_hopper", lambda: kernels)
    x, table = torch.zeros(40, 2, 128, dtype=torch.bfloat16), torch.zeros(3, 3, dtype=torch.int32)
    args = BlockArgs(table, None, None, 0.1, 64, False, True, 1e-6)
    launch.block_attention_forward(x, x, x, args, config=launch.gluon_config(64, "forward"))
    launch.block_attention_backward(x, x, x, x, x, x, x, args, config=launch.gluon_config(64, "backward"))
    assert [k.calls for k in kernels] == [1, 1]
