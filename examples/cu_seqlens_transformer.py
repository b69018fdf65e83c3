"""A plain PyTorch transformer over packed sequences: `flash_attn_varlen_func` swapped for ours in one line.

The model keeps its `cu_seqlens` interface (int32 [B + 1], as flash-attn wants it) and its weights. It runs on a GPU
if there is one, in bf16 as flash-attn asks. Where flash-attn is not installed, and on a CPU, attention sequence by
sequence stands in for it, so that the swap can be checked anywhere.

Letters: T rows of all sequences, D width, N heads, H head width.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from gemworks.jagged import flash_attention
from torch import Tensor, nn

D, N, NUM_LAYERS, VOCABULARY = 64, 4, 2, 100
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_FLASH_ATTN = DEVICE == "cuda" and importlib.util.find_spec("flash_attn") is not None


def theirs(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """What the model came with."""
    if HAS_FLASH_ATTN:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        return flash_attn_varlen_func(q_TNH, k_TNH, v_TNH, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)
    outs = []
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (q_TNH, k_TNH, v_TNH))
        outs.append(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
    return torch.cat(outs)


def ours(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """The swap. `cu_seqlens` are offsets already."""
    return flash_attention(q_TNH, k_TNH, v_TNH, cu_seqlens.long(), max_length_q=max_seqlen, causal=True)


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.ffn = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x_TD: Tensor, cu_seqlens: Tensor, max_seqlen: int, attention: Attention) -> Tensor:
        q_TNH, k_TNH, v_TNH = self.qkv(self.norms[0](x_TD)).unflatten(-1, (3, N, D // N)).unbind(1)
        x_TD = x_TD + self.out(attention(q_TNH, k_TNH, v_TNH, cu_seqlens, max_seqlen).flatten(1))
        return x_TD + self.ffn(self.norms[1](x_TD))


class Transformer(nn.Module):
    """Next-token prediction on packed sequences."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(D, VOCABULARY)

    def forward(self, tokens_T: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x_TD = self.embedding(tokens_T)
        for block in self.blocks:
            x_TD = block(x_TD, cu_seqlens, max_seqlen, self.attention)
        return self.head(x_TD)


def main() -> None:
    torch.manual_seed(0)
    dtype, tolerance = (torch.bfloat16, 3e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)
    model = Transformer(theirs).to(DEVICE, dtype)
    lengths = torch.tensor([5, 1, 0, 130, 64])
    cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(DEVICE)
    tokens = torch.randint(0, VOCABULARY, (int(lengths.sum()),), device=DEVICE)
    results = {}
    for name, attention in (("theirs", theirs), ("ours", ours)):
        model.attention = attention
        model.zero_grad()
        logits = model(tokens, cu_seqlens, int(lengths.max()))
        logits.float().logsumexp(-1).sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results[name] = (logits.detach().float(), gradients.float())
    errors = [((a - b).norm() / a.norm()).item() for a, b in zip(results["theirs"], results["ours"], strict=True)]
    before = "flash-attn" if HAS_FLASH_ATTN else "SDPA of each sequence"
    print(f"{before} on {DEVICE}, {dtype}; relative difference after the swap: ", end="")
    print(f"logits {errors[0]:.1e}, gradients {errors[1]:.1e}")
    assert max(errors) < tolerance


if __name__ == "__main__":
    main()
