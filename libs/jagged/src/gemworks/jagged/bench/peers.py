"""Ours and the peers, each as a closure that returns packed output rows [rows, N, H]; one that can't run says why."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gemworks.jagged import flash_attention, gdpa
from gemworks.jagged.bench.cases import Inputs
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Maker = Callable[[Inputs], "Contender"]


@dataclass(frozen=True)
class Contender:
    """Something to time. It computes `out_scale * act(logit_scale * q k^T) v`, whatever the case asks for.

    Attributes:
        attend: of q, k and v.
        leaves: what it takes instead of the case's q, k and v, e.g. padded.
        unpack: from what it returns to packed rows; None where it returns those.
        activation: softmax, or one of `gdpa`'s; None if unknown, then only finiteness is checked.
        logit_scale: None for the case's scale.
    """

    attend: Attend
    leaves: list[Tensor] | None = None
    unpack: Callable[[Tensor], Tensor] | None = None
    activation: str | None = "softmax"
    logit_scale: float | None = None
    out_scale: float = 1.0


def ours(x: Inputs) -> Contender:
    bounds: dict[str, Any] = {
        "max_length_q": None if x.offsets_q is None else x.case.maximum,
        "max_length_k": None if x.offsets_k is None else x.case.maximum,
        "shared_query": x.case.kind == "pool",
        "window": x.case.window or None,
        "causal": x.case.causal,
        "schedule": x.schedule,
    }
    activation: Any = x.case.computes

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if activation == "softmax":
            out = flash_attention(q, k, v, x.offsets_q, x.offsets_k, scale=x.scale, **bounds)
        else:
            out = gdpa(q, k, v, x.offsets_q, x.offsets_k, scale=x.scale, activation=activation, **bounds)
        return out.flatten(0, 1) if out.dim() == 4 else out

    return Contender(attend, activation=activation)


def _cu_seqlens(x: Inputs, side: str) -> Tensor:
    lengths = x.lengths_q if side == "q" else x.lengths_k
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32).to(x.q.device)


def _packed(x: Inputs, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A shared query repeated for each sequence, keys of a sequence as packed rows: what varlen interfaces take."""
    if x.case.kind == "pool" and q.shape[0] == x.case.rows:  # the benchmark gives peers a q that is repeated already
        q = q.repeat(x.case.batch, 1, 1)
    if k.dim() == 4:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    return q, k, v


def _longest(x: Inputs) -> tuple[int, int]:
    return int(x.lengths_q.max()), int(x.lengths_k.max())


def torch_varlen(x: Inputs) -> Contender:
    from torch.nn.attention.varlen import varlen_attn

    cu_q, cu_k, (max_q, max_k) = _cu_seqlens(x, "q"), _cu_seqlens(x, "k"), _longest(x)
    options: dict[str, Any] = {"scale": x.scale}
    if x.case.window:
        options["window_size"] = (x.case.window - 1, x.case.window - 1)
    if x.case.causal:
        options["window_size"] = (-1, 0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attn(*_packed(x, q, k, v), cu_q, cu_k, max_q, max_k, **options)
        assert isinstance(out, Tensor)
        return out

    return Contender(attend)


def flash_attn_4(x: Inputs) -> Contender:
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    max_q, max_k = _longest(x)
    options: dict[str, Any] = {
        "cu_seqlens_q": _cu_seqlens(x, "q"),
        "cu_seqlens_k": _cu_seqlens(x, "k"),
        "max_seqlen_q": max_q,
        "max_seqlen_k": max_k,
        "softmax_scale": x.scale,
        "causal": x.case.causal,
    }
    if x.case.window:
        options["window_size"] = (x.case.window - 1, x.case.window - 1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_varlen_func(*_packed(x, q, k, v), **options)
        return out[0] if isinstance(out, tuple) else out

    return Contender(attend)


def flex_attention(x: Inputs) -> Contender:
    """FlexAttention, compiled for this shape alone, with a document mask over the packed rows."""
    import torch._functorch.config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    functorch_config.donated_buffer = False  # the backward is timed again and again over one graph
    torch._dynamo.reset()  # or a second shape would be compiled with symbolic sizes, which its lowering does not take
    device = x.q.device
    document_q, document_k = (
        torch.repeat_interleave(torch.arange(len(n)), n).to(device) for n in (x.lengths_q, x.lengths_k)
    )
    at_q, at_k = (
        torch.arange(len(document), device=device) - cu[document]
        for document, cu in ((document_q, _cu_seqlens(x, "q")), (document_k, _cu_seqlens(x, "k")))
    )
    window, causal = x.case.window, x.case.causal

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        admitted = document_q[i] == document_k[j]
        if window or causal:
            away = at_k[j] - at_q[i]
            admitted = admitted & (away <= 0) if causal else admitted & (away < window) & (away > -window)
        return admitted

    mask = create_block_mask(same, None, None, len(document_q), len(document_k), device=str(device), _compile=True)
    compiled: Any = torch.compile(partial(flex, block_mask=mask, scale=x.scale), dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [t.transpose(0, 1)[None] for t in _packed(x, q, k, v)]
        return compiled(*rows)[0].transpose(0, 1)

    return Contender(attend)


def padded_sdpa(x: Inputs) -> Contender:
    """scaled_dot_product_attention over a padded batch with a key mask; padding itself is not timed.

    cuDNN's kernel where it takes the batch, else whatever torch chooses. Causal needs no mask: keys past the end of a
    sequence come after its queries.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if x.case.window:
        raise NotImplementedError("a window on a padded batch would need a dense mask")
    device, (max_q, max_k) = x.q.device, _longest(x)
    need = x.case.batch * (2 * max_q + 2 * max_k) * x.case.heads * x.case.head_dim * 2 * 4
    if device.type == "cuda" and need > 0.5 * torch.cuda.mem_get_info(device)[0]:
        raise MemoryError(f"needs about {need / 2**30:.0f} GiB padded")
    inside_q, inside_k = (
        (torch.arange(n)[None] < lengths[:, None]).to(device)
        for n, lengths in ((max_q, x.lengths_q), (max_k, x.lengths_k))
    )
    mask = None if x.case.causal or bool(inside_k.all()) else inside_k[:, None, None, :]

    def pad(rows: Tensor, inside: Tensor) -> Tensor:
        out = rows.new_zeros(*inside.shape, *rows.shape[1:])
        out[inside] = rows
        return out.transpose(1, 2).detach().requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=x.scale, is_causal=x.case.causal)

    def attend_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend(q, k, v)

    rows = _packed(x, *x.leaves)
    leaves = [pad(rows[0], inside_q), pad(rows[1], inside_k), pad(rows[2], inside_k)]
    del rows
    chosen = attend
    if device.type == "cuda":
        try:
            attend_cudnn(*leaves).sum().backward()
            chosen = attend_cudnn
        except RuntimeError:  # no cuDNN kernel for these arguments
            chosen = attend
        for leaf in leaves:
            leaf.grad = None
    return Contender(chosen, leaves, lambda out: out.transpose(1, 2)[inside_q])


def _parts_of(spec: str) -> tuple[str, str, str]:
    name, _, place = spec.partition("=")
    path, _, function = place.rpartition(":")
    if not name or not path or not function:
        raise ValueError(f"peer: got {spec!r}, expected NAME=FILE.py:FUNCTION")
    return name, path, function


def from_file(spec: str) -> tuple[str, Maker]:
    """A peer of your own: NAME=FILE.py:FUNCTION.

    FUNCTION(q, k, v, cu_q, cu_k, max_q, max_k, scale) -> [Tq, N, H], or FUNCTION(inputs: Inputs) -> Contender where it
    is named `make` (it then says what it computes, and is checked like every other peer).

    Raises:
        ValueError: not of that form.
    """
    name, path, function = _parts_of(spec)
    loaded: dict[str, Any] = {}

    def make(x: Inputs) -> Contender:
        if not loaded:
            loaded.update(runpy.run_path(path))
        call = loaded[function]
        if function == "make":
            return call(x)
        if x.case.window or x.case.causal:
            raise NotImplementedError("a plain function from a file has neither window nor causal")
        cu_q, cu_k, (max_q, max_k) = _cu_seqlens(x, "q"), _cu_seqlens(x, "k"), _longest(x)
        return Contender(lambda q, k, v: call(*_packed(x, q, k, v), cu_q, cu_k, max_q, max_k, x.scale), activation=None)

    return name, make


@dataclass(frozen=True)
class Shares:
    """How a peer's file compiles beforehand.

    Attributes:
        count: of shares.
        prepare: compiles one share, of (share, shares).
        priority: of the first case that the peer takes.
    """

    count: int
    prepare: Callable[[int, int], None]
    priority: int


def shares_of(spec: str) -> tuple[str, Shares | None]:
    """A peer's name, and what its file compiles beforehand: its function `prepare`, its numbers SHARES and PRIORITY."""
    name, path, _ = _parts_of(spec)
    loaded = runpy.run_path(path)
    if "prepare" not in loaded:
        return name, None
    return name, Shares(loaded["SHARES"], loaded["prepare"], loaded["PRIORITY"])


def quick_contest() -> Callable[..., Any]:
    """For Triton's autotuner: times each configuration for a fifth of what it would by itself.

    What wins by less than a per cent may lose. What the winner is timed with afterwards is not concerned.
    """
    from triton.testing import do_bench

    return partial(do_bench, warmup=5, rep=20)


def tune_quickly() -> None:
    """Every autotuner of this process that brings no clock of its own takes `quick_contest`."""
    from triton.runtime import driver

    active: Any = driver.active
    active.get_benchmarker = quick_contest


PEERS: dict[str, Maker] = {
    "torch varlen_attn": torch_varlen,
    "flash-attn-4": flash_attn_4,
    "FlexAttention": flex_attention,
    "padded SDPA": padded_sdpa,
}
