"""Peer: the Triton GDPA of facebookresearch/ads_model_kernel_library (Apache 2.0), with its fast_gelu.

    export GEMWORKS_PEERS=FOLDER
    python -m gemworks.jagged.bench --peer "Meta Triton GDPA=libs/jagged/benchmarks/peers/meta_gdpa.py:make"

FOLDER/meta/ads_mkl/ops/oss/gdpa holds that repository's gdpa/triton and gdpa/utils. Stock Triton does not compile its
backward until the `: object` annotations in the kernels' signatures are removed. Autotuning stays on; of its 36
forward configurations those with a tile of 32 rows are left out (24 are kept), of the 20 backward ones none. The
benchmark's --prepare compiles them beforehand, a share at a time.

It computes `act(q k^T) v`, so the scale of the logits is 1.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged.bench.cases import Case, Inputs, make_inputs
from gemworks.jagged.bench.peers import Contender, tune_quickly
from torch import Tensor

SHARES, PRIORITY = 12, 0


def load() -> Any:
    """The module of the kernels, with the forward's configurations cut to those that can win at a width of 128."""
    import triton.language as tl

    folder = Path(os.environ["GEMWORKS_PEERS"]) / "meta"
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    language: Any = tl
    if not hasattr(language, "async_task"):
        language.async_task = None  # of Meta's fork; named, and not used on this path
    from ads_mkl.ops.oss.gdpa.triton import (  # pyright: ignore[reportMissingImports]
        triton_generalized_dot_product_attention as module,
    )

    tune_quickly()
    kept = tuple(c for c in module.fwd_autotune_configs["default"] if c.kwargs["BLOCK_M"] > 32)
    module.fwd_autotune_configs["default"] = kept
    return module


def make(x: Inputs) -> Contender:
    if x.case.window or x.case.causal:
        raise NotImplementedError("its kernels refuse causal, and its window counts otherwise")
    gdpa = load().generalized_dot_product_attention
    offsets_q, offsets_k = (
        torch.cat([n.new_zeros(1), n.cumsum(0)]).to(torch.int32).to(x.q.device) for n in (x.lengths_q, x.lengths_k)
    )
    shared = x.case.kind == "pool"
    max_q, max_k = (x.case.rows if x.case.kind == kind else x.case.maximum for kind in ("pool", "pffn"))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.dim() == 4:
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        return gdpa(q, k, v, offsets_q, offsets_k, max_q, max_k, broadcast_q=shared, activation="fast_gelu")

    leaves = x.leaves if shared else None  # it takes a shared query as it is
    return Contender(attend, leaves, activation="gelu_tanh", logit_scale=1.0)


def prepare(index: int, count: int) -> None:
    """Compile every n-th configuration on tiny batches, so that n processes fill Triton's cache side by side."""
    module = load()
    tables = (module.fwd_autotune_configs, module.bwd_autotune_configs)
    every = [table["default"] for table in tables]
    forget(module)
    try:
        for table, configs in zip(tables, every, strict=True):
            table["default"] = configs[index::count] or configs[:1]
        pffn = Case("gdpa", "pffn", 16, 2048, "full", rows=256)
        for case in (Case("gdpa", "self", 16, 1024), pffn, replace(pffn, kind="pool", law="uniform")):
            x = make_inputs(case, torch.device("cuda"), torch.bfloat16)
            out = make(x).attend(*x.leaves)
            torch.autograd.grad(out, x.leaves, torch.randn_like(out))
        torch.cuda.synchronize()
    finally:
        for table, configs in zip(tables, every, strict=True):
            table["default"] = configs
        forget(module)


def forget(module: Any) -> None:
    """The tuners that it keeps hold the configurations of their first call."""
    module.get_autotune_fwd_kernel.cache_clear()
    module.get_autotune_bwd_kernel.cache_clear()
