"""Every mistake of the caller is a ValueError that names the argument and the fix."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemworks.jagged import (
    AttentionBias,
    Jagged,
    Rope,
    RopeTables,
    TileSchedule,
    apply_rope,
    block_attention,
    debug_checks,
    explain,
    flash_attention,
    from_padded,
    gdpa,
    kronecker_compress,
    layer_norm,
    mean_pool,
    rms_norm,
    seed_pool,
    support,
    token_map,
)
from gemworks.jagged.dispatch import OPS

pytestmark = pytest.mark.reference

X = torch.zeros(5, 2, 4)
O = torch.tensor([0, 2, 5])


def flash(q: Any = X, k: Any = X, v: Any = X, offsets_q: Any = O, offsets_k: Any = None, **kw: Any) -> Any:
    kw.setdefault("max_length_q", 4)
    return flash_attention(q, k, v, offsets_q, offsets_k, **kw)


def wrong(value: Any) -> Any:
    """Of a type that the signature refuses."""
    return value


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "not at 0": (lambda: flash(offsets_q=torch.tensor([1, 2, 5])), r"offsets_q: starts at 1, expected 0"),
    "decreasing": (lambda: flash(offsets_q=torch.tensor([0, 4, 2])), r"not monotone, offsets_q\[2\] = 2"),
    "negative": (lambda: flash(offsets_q=torch.tensor([0, -1, 2])), r"not monotone"),
    "too long": (lambda: flash(offsets_q=torch.tensor([0, 2, 9])), r"ends at 9, but there are only 5 rows"),
    "bound": (lambda: flash(max_length_q=2), r"max_length of offsets_q: got 2, but sequence 1 has 3 rows"),
    "bound of k": (
        lambda: flash(offsets_k=O.clone(), max_length_k=2),
        r"max_length of offsets_k: got 2, but sequence 1 has 3 rows",
    ),
    "no bound": (lambda: flash(max_length_q=None), r"max_length_q: missing"),
    "no bound of k": (lambda: flash(offsets_k=O.clone()), r"max_length_k: missing"),
    "tensor bound": (lambda: flash(max_length_q=torch.tensor(4)), r"max_length_q: got Tensor, expected int"),
    "negative bound": (lambda: flash(max_length_q=-1), r"max_length_q: got -1"),
    "offsets dtype": (lambda: flash(offsets_q=O.float()), r"offsets_q: got dtype torch.float32.*int64"),
    "offsets shape": (lambda: flash(offsets_q=O[None]), r"offsets_q: got shape \(1, 3\)"),
    "no offsets": (lambda: flash(offsets_q=None), r"offsets_q: missing"),
    "offsets list": (lambda: flash(offsets_q=[0, 5]), r"offsets_q: got list"),
    "device": (lambda: flash(k=X.to("meta")), r"k: got device meta, expected cpu"),
    "offsets device": (lambda: flash(offsets_q=O.to("meta")), r"offsets_q: got device meta"),
    "dtype": (lambda: flash(v=X.double()), r"v: got dtype torch.float64, expected torch.float32 like q"),
    "int dtype": (lambda: flash(q=X.long()), r"q: got dtype torch.int64"),
    "q dims": (lambda: flash(q=X[0]), r"q: got shape \(2, 4\)"),
    "kv dims": (lambda: flash(k=X[None]), r"k, v: got shapes"),
    "kv rows": (lambda: flash(v=X[:4]), r"v: got shape \(4, 2, 4\)"),
    "heads": (lambda: flash(q=torch.zeros(5, 3, 4)), r"k: got 2 heads, expected a divisor of q's 3"),
    "width": (lambda: flash(q=torch.zeros(5, 2, 8)), r"k: got head width 4, expected q's 8"),
    "wide": (
        lambda: flash(torch.zeros(5, 1, 512), torch.zeros(5, 1, 512), torch.zeros(5, 1, 4)),
        r"got head width 512, expected 1..256.*support\(\)",
    ),
    "wide v": (lambda: flash(v=torch.zeros(5, 2, 300)), r"v: got head width 300"),
    "batch of k": (lambda: flash(offsets_k=torch.tensor([0, 5]), max_length_k=8), r"offsets_k: got 1 sequences"),
    "batch of 4-D k": (lambda: flash(k=X[None], v=X[None]), r"k: got 1 sequences, expected 2"),
    "rows of k": (lambda: flash(k=X[:4], v=X[:4]), r"offsets_k: missing, but k has 4 rows and q has 5"),
    "4-D with offsets": (lambda: flash(k=X[None], v=X[None], offsets_k=O), r"offsets_k: got a tensor with a 4-D k"),
    "shared with offsets": (lambda: flash(offsets_k=O, shared_query=True), r"offsets_q: got a tensor with shared"),
    "shared without": (lambda: flash(offsets_q=None, shared_query=True), r"offsets_k: missing; pass the offsets"),
    "no tensor": (lambda: flash(q=[1, 2]), r"got list, Tensor, Tensor, expected Tensors"),
    "no tensor of blocks": (lambda: block_attention(None, X, X, O, max_length_q=4), r"got NoneType"),  # pyright: ignore
    "no heads": (lambda: flash(X[:, :0], X[:, :0], X[:, :0]), r"q: got shape \(5, 0, 4\) without a head"),
    "block dims": (lambda: block_attention(X[0], X[0], X[0], O, max_length_q=4), r"q: got shape \(2, 4\)"),
    "scale on a device": (lambda: flash(scale=torch.tensor(0.5)), r"scale: got a Tensor on cpu, expected a number"),
    "scale text": (lambda: gdpa(X, X, X, O, max_length_q=4, scale="auto"), r"scale: got 'auto'"),  # pyright: ignore
    "causal text": (lambda: flash(causal="false"), r"causal: got 'false'"),
    "window": (lambda: flash(window=0), r"window: got 0"),
    "window pair": (lambda: flash(window=(1, -2)), r"window: got \(1, -2\)"),
    "align": (lambda: flash(align="left"), r"align: got 'left'"),
    "activation": (lambda: gdpa(X, X, X, O, max_length_q=4, scale=1.0, activation="swish"), r"'swish', expected"),  # pyright: ignore
    "block": (lambda: block_attention(X, X, X, O, max_length_q=4, block=16), r"block: got 16"),
    "block cross": (lambda: block_attention(X, X[:4], X[:4], O, max_length_q=4), r"block attention is self"),
    "pool norm": (lambda: seed_pool(X, X, X, O, max_length_k=4, activation="relu", qk_norm=True), r"qk_norm: not part"),
    "no table": (lambda: flash(bias=AttentionBias()), r"bias: got no table"),
    "even table": (
        lambda: flash(bias=AttentionBias(torch.zeros(4, 2))),
        r"position_table: got 4 rows",
    ),
    "table heads": (
        lambda: flash(bias=AttentionBias(torch.zeros(5, 3))),
        r"expected floating \[buckets, 2",
    ),
    "no times": (lambda: flash(bias=AttentionBias(time_table=torch.zeros(4, 2))), r"timestamps_q: missing"),
    "times": (
        lambda: flash(bias=AttentionBias(time_table=torch.zeros(4, 2), timestamps_q=torch.zeros(4).long())),
        r"timestamps_q: got torch.int64 \(4,\).*\[5\]",
    ),
    "time unit": (
        lambda: flash(bias=AttentionBias(None, torch.zeros(4, 2), torch.zeros(5).long(), None, 0)),
        r"time_unit: got 0",
    ),
    "rope rows": (lambda: flash(rope=RopeTables(torch.ones(4, 2), torch.ones(4, 2))), r"rope.cos_TJ: got \(4, 2\)"),
    "rope itself": (lambda: flash(rope=Rope()), r"rope: got Rope, expected RopeTables; Rope.tables"),  # pyright: ignore
    "apply rope rows": (lambda: apply_rope(X[:4], Rope().tables(O, 4, total=5)), r"tables.cos_TJ: got \(5, 2\)"),
    "apply rope width": (lambda: apply_rope(X[..., :2], Rope().tables(O, 4, total=5)), r"tables.cos_TJ: got \(5, 2\)"),
    "apply rope dims": (lambda: apply_rope(X[:, 0], Rope().tables(O, 4, total=5)), r"x: got shape \(5, 4\)"),
    "bias itself": (lambda: flash(bias=torch.zeros(5, 2)), r"bias: got Tensor, expected an AttentionBias"),
    "schedule kind": (lambda: flash(schedule=O), r"schedule: got Tensor, expected a TileSchedule"),
    "schedule batch": (
        lambda: flash(schedule=TileSchedule.build(torch.arange(100), total_q=99)),
        r"schedule: got tiles of another batch, expected 2 sequences with 5 rows of q",
    ),
    "schedule rows": (
        lambda: flash(schedule=TileSchedule.build(torch.tensor([0, 2, 900]), total_q=900)),
        r"schedule: got tiles of another batch",
    ),
    "list width": (lambda: Jagged.from_list([X[0], X[0, :, :3]]), r"sequences\[1\]: got torch.float32 rows \(3,\)"),
    "list dtype": (lambda: Jagged.from_list([X[0], X[0].half()]), r"sequences\[1\]: got torch.float16"),
    "list of scalars": (lambda: Jagged.from_list([torch.tensor(1.0)]), r"sequences: got something else"),
    "no list": (lambda: Jagged.from_list(X), r"sequences: got something else"),  # pyright: ignore
    "lengths list": (lambda: Jagged.from_lengths(X, [2, 3]), r"lengths: got list, expected a Tensor"),  # pyright: ignore
    "rope_k alone": (lambda: flash(rope_k=Rope().tables(O, 4, total=5)), r"rope_k: got tables while rope is None"),
    "rope odd": (lambda: Rope().tables(O, 3, total=5), r"head_dim: got 3"),
    "rope no dt": (lambda: Rope(time_fraction=0.5).tables(O, 4, total=5), r"dt: missing"),
    "rope dt": (lambda: Rope(time_fraction=0.5).tables(O, 4, total=5, dt=torch.ones(4)), r"dt: got \(4,\)"),
    "rope share": (lambda: Rope(time_fraction=1.5), r"time_fraction: got 1.5"),
    "rope scale": (lambda: Rope(time_scale=0.0), r"time_scale: got 0.0"),
    "norm width": (lambda: rms_norm(torch.zeros(2, 9000)), r"rms_norm: x has shape \(2, 9000\)"),
    "norm weight": (lambda: layer_norm(torch.zeros(2, 3), torch.ones(2)), r"weight has shape \(2,\)"),
    "norm eps": (lambda: rms_norm(torch.zeros(2, 3), eps=-1.0), r"eps is -1.0, expected a number >= 0"),
    "norm device": (lambda: rms_norm(torch.zeros(2, 3), torch.ones(3, device="meta")), r"weight is on meta"),
    "norm list": (lambda: rms_norm([1.0]), r"x: got list, expected a Tensor"),  # pyright: ignore
    "norm residual": (lambda: layer_norm(torch.zeros(2, 3), residual=torch.ones(3)), r"residual has shape"),
    "pool": (lambda: mean_pool(torch.zeros(3), torch.tensor([0, 4])), r"offsets: ends at 4"),
    "kronecker": (
        lambda: kronecker_compress(torch.zeros(1, 2, 3), torch.zeros(1, 3, 2), torch.zeros(1, 3, 3)),
        r"h, z, w: got",
    ),
    "token map": (
        lambda: token_map(torch.zeros(1, 2, 3), torch.zeros(4, 2), torch.zeros(2, 3)),
        r"x, weight, base: got .*, expected \[B, N, D\], \[K, N\], \[K, D\]",
    ),
    "token map dtype": (
        lambda: token_map(torch.zeros(1, 2, 3), torch.zeros(4, 2).double(), torch.zeros(4, 3)),
        r"weight: got dtype torch.float64",
    ),
    "jagged": (lambda: Jagged(torch.zeros(5), torch.tensor([0, 5]), 4), r"max_length of offsets: got 4"),
    "padded both": (lambda: from_padded(torch.zeros(1, 2)), r"neither given"),
    "padded lengths": (lambda: from_padded(torch.zeros(1, 2), torch.tensor([3])), r"lengths: got 3..3, expected 0..2"),
    "padded total": (lambda: from_padded(torch.zeros(1, 2), torch.tensor([2]), total=1), r"total: got 1"),
    "op": (lambda: explain("attention"), r"op: got 'attention'"),
    "explain device": (lambda: explain("gdpa", device="tpu"), r"device: got 'tpu', expected one that torch has here"),
    "explain no device": (lambda: explain("gdpa", device=wrong(None)), r"device: got None"),
    "explain half a device": (lambda: explain("gdpa", device=wrong(0.5)), r"device: got 0.5"),
    "explain dtype": (lambda: explain("gdpa", dtype=torch.int8), r"reference does not take torch.int8"),
    "explain width": (lambda: explain("gdpa", head_dim=512), r"takes head widths up to 256, not 512"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_value_errors_with_the_fix(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["not at 0", "decreasing", "negative", "too long", "bound", "bound of k"])
def test_offsets_on_a_device_are_checked_in_debug_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the host nothing is read, and nothing raised, until `debug_checks`."""
    from gemworks.jagged import _checks

    call, message = BAD[name]
    monkeypatch.setattr(_checks, "is_host", lambda x: False)
    with debug_checks(), pytest.raises(ValueError, match=message):
        call()
    checked: list[Any] = []
    monkeypatch.setattr(_checks, "_check_offset_values", lambda *given: checked.append(given))
    flash()
    assert not checked
    with debug_checks():
        flash()
        assert checked
        flash(*[X.to("meta")] * 3, offsets_q=O.to("meta"))  # has no values to read


def test_debug_mode_comes_from_the_environment() -> None:
    import subprocess
    import sys

    code = "import gemworks.jagged._checks as c; print(c._debug)"
    for value, expected in (("1", "True"), ("0", "False")):
        environment = os.environ | {"GEMWORKS_JAGGED_DEBUG": value}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == expected


def test_support_lists_every_op_dtype_and_direction_once() -> None:
    table = support()
    assert len(set(table)) == len(table)
    assert {row.op for row in table} == set(OPS)
    for op in OPS:
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            mine = [row for row in table if row.op == op and row.dtype == dtype]
            assert {row.direction for row in mine} == {"forward", "backward"}


def shadowed(row: Any) -> bool:
    half = row.dtype in ("float16", "bfloat16")
    return row.op == "block_attention" and row.backend == "triton" and row.architecture == "sm_90" and half


def test_explain_agrees_with_support() -> None:
    for row in support():
        place = "cpu" if row.architecture == "any" else row.architecture
        told = explain(row.op, dtype=getattr(torch, row.dtype), architecture=place, head_dim=row.max_head_dim)
        # Plain Triton's rows of block_attention are what gluon refuses: grouped heads, blocks of 32.
        assert told.backend == ("gluon" if shadowed(row) else row.backend)
        assert row.dtype in str(told)


def test_explain_knows_what_block_attention_fuses() -> None:
    told = str(explain("block_attention", architecture="sm_90", head_dim=128, features=("qk_norm", "rope")))
    assert told.startswith("block_attention: gluon (")
    assert "in PyTorch" not in told
    grouped = explain("block_attention", architecture="sm_90", head_dim=128, features=("grouped",))
    assert grouped.backend == "triton"


def test_importing_needs_no_gpu_and_no_triton() -> None:
    import subprocess
    import sys

    code = "import gemworks.jagged, sys; print('triton' in sys.modules, 'torchrec' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="0 is a device here")
def test_a_devices_number_is_a_device_where_there_is_one() -> None:
    with pytest.raises(ValueError, match="device: got 0"):
        explain("gdpa", device=0)  # pyright: ignore[reportArgumentType]
