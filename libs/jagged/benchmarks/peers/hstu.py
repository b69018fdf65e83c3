"""Peer: the Triton HSTU attention of meta-recsys/generative-recommenders (Apache 2.0): SiLU, causal.

    export GEMWORKS_PEERS=FOLDER
    python -m gemworks.jagged.bench --peer "HSTU Triton=libs/jagged/benchmarks/peers/hstu.py:make"
    python libs/jagged/benchmarks/peers/hstu.py --shard 3/14   # beforehand: compiles a share of it

FOLDER/hstu/generative_recommenders holds of that repository common.py, ops/utils.py and, in ops/triton,
triton_hstu_attention.py and triton_attention_utils.py. All of its configurations for stock Triton are tuned over.

It computes `silu(scale q k^T) v / N` under a causal mask, N the longest length.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from gemworks.jagged.bench.cases import Case, Inputs, make_inputs
from gemworks.jagged.bench.peers import Contender
from torch import Tensor


def load() -> Any:
    folder = Path(os.environ["GEMWORKS_PEERS"]) / "hstu"
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    from generative_recommenders.ops.triton import (  # pyright: ignore[reportMissingImports]
        triton_hstu_attention as module,
    )

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


def main() -> None:
    """Compile every n-th configuration on a tiny batch, so that n processes fill Triton's cache side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", required=True, metavar="I/N")
    index, count = map(int, parser.parse_args().shard.split("/"))
    module = load()
    for kernel in (module._hstu_attn_fwd, module._hstu_attn_bwd):
        kernel.configs = kernel.configs[index::count] or kernel.configs[:1]
    x = make_inputs(Case("gdpa", "self", 16, 1024, causal=True), torch.device("cuda"), torch.bfloat16)
    out = make(x).attend(*x.leaves)
    torch.autograd.grad(out, x.leaves, torch.randn_like(out))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
