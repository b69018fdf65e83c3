"""Peer: the Triton HSTU attention of meta-recsys/generative-recommenders (Apache 2.0): SiLU, causal.

    export GEMWORKS_PEERS=FOLDER
    python -m gemworks.jagged.bench --peer "HSTU Triton=libs/jagged/benchmarks/peers/hstu.py:make"

FOLDER/hstu/generative_recommenders holds of that repository common.py, ops/utils.py and, in ops/triton,
triton_hstu_attention.py and triton_attention_utils.py. Tuned over are its configurations for stock Triton whose tile
has 64 x 64 elements or more (17 forward, 9 backward). The benchmark's --prepare compiles them beforehand, a share at a
time.

It computes `silu(scale q k^T) v / N` under a causal mask, N the longest length.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged.bench.cases import Case, Inputs, make_inputs
from gemworks.jagged.bench.peers import Contender, quick_contest
from torch import Tensor

SHARES, PRIORITY = 13, 1
SMALLEST_TILE = 64 * 64


def load() -> Any:
    folder = Path(os.environ["GEMWORKS_PEERS"]) / "hstu"
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    from generative_recommenders.ops.triton import (  # pyright: ignore[reportMissingImports]
        triton_hstu_attention as module,
    )

    for kernel in (module._hstu_attn_fwd, module._hstu_attn_bwd):
        kernel.configs = [c for c in kernel.configs if c.kwargs["BLOCK_M"] * c.kwargs["BLOCK_N"] >= SMALLEST_TILE]
        kernel._do_bench = quick_contest()
    return module


def make(x: Inputs) -> Contender:
    if not x.case.causal:
        raise NotImplementedError("its kernels are causal self-attention")
    attention = load().triton_hstu_mha
    offsets = torch.cat([x.lengths_q.new_zeros(1), x.lengths_q.cumsum(0)]).to(x.q.device)
    longest = x.case.maximum

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(longest, x.scale, q, k, v, offsets)

    return Contender(attend, activation="silu", out_scale=1.0 / longest)


def prepare(index: int, count: int) -> None:
    """Compile every n-th configuration on a tiny batch, so that n processes fill Triton's cache side by side."""
    module = load()
    kernels = (module._hstu_attn_fwd, module._hstu_attn_bwd)
    every = [kernel.configs for kernel in kernels]
    try:
        for kernel, configs in zip(kernels, every, strict=True):
            kernel.configs = configs[index::count] or configs[:1]
            kernel.cache.clear()  # what it chose from another share
        x = make_inputs(Case("gdpa", "self", 16, 1024, causal=True), torch.device("cuda"), torch.bfloat16)
        out = make(x).attend(*x.leaves)
        torch.autograd.grad(out, x.leaves, torch.randn_like(out))
        torch.cuda.synchronize()
    finally:
        for kernel, configs in zip(kernels, every, strict=True):
            kernel.configs = configs
            kernel.cache.clear()
