"""Self-attention over packed sequences: blocks, a sliding window, or everything.

Letters: T packed events, N heads, H head width, E = N * H width of the event type.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from gemworks.gem.config import EventSizes, ModelConfig
from gemworks.gem.kernels import KernelConfig
from gemworks.gem.model.events import Sequence
from gemworks.gem.model.layers import linear
from gemworks.gem.model.norms import rms_norm
from gemworks.gem.model.plain import padded_attention, varlen_attention
from gemworks.gem.model.residual import add_linear
from gemworks.jagged import (
    BlockSchedule,
    TileSchedule,
    apply_rope,
    block_attention,
    block_attention_qkv,
    flash_attention,
    flash_attention_fp8,
    flash_attention_qkv,
)
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """`s + W_o attend(rope(norm(q)), rope(norm(k)), v)` with `q, k, v = norm(s) W_qkv`; bidirectional.

    QK-norm is an RMS norm per head without affine, before the rotation. `W_o` starts small, so that a fresh layer
    mostly passes its input through and the stream stays near unit scale.
    """

    def __init__(
        self, sizes: EventSizes, config: ModelConfig, kernels: KernelConfig, *, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.num_heads, self.head_dim = sizes.num_heads, sizes.head_dim
        self.kind, self.block, self.window = sizes.attention, config.block, sizes.window
        self.qkv = linear(sizes.dim, 3 * sizes.dim, bias=False, device=device)
        self.out = linear(sizes.dim, sizes.dim, gain=0.5, bias=False, device=device)

    def forward(self, sequence: Sequence, *, without_residual: bool = False) -> Tensor:
        s_TE = sequence.s_TD
        qkv_TXH = self.qkv(rms_norm(s_TE, self.kernels.norm)).unflatten(-1, (3 * self.num_heads, self.head_dim))
        heads_TE = self.attend(qkv_TXH, sequence).flatten(-2)
        return self.out(heads_TE) if without_residual else add_linear(s_TE, heads_TE, self.out)

    def attend(self, qkv_TXH: Tensor, sequence: Sequence) -> Tensor:
        """Attention of a projection [T, 3 N, H], QK-norm and rotation included: [T, N, H]."""
        fused = self.kernels.fused_qk and self.kernels.attention == "gemworks" and not self._in_fp8
        return self._fused(qkv_TXH, sequence) if fused else self._separate(qkv_TXH, sequence)

    def _fused(self, qkv_TXH: Tensor, sequence: Sequence) -> Tensor:
        """QK-norm and rotation are the op's business."""
        bound, scale = sequence.max_length, 1.0 / math.sqrt(self.head_dim)
        if self.kind == "block":
            return block_attention_qkv(
                qkv_TXH, sequence.offsets_S, num_heads=self.num_heads, max_length=bound, scale=scale, block=self.block,
                rope=sequence.rope, qk_norm=True, schedule=self._blocks(sequence),
            )  # fmt: skip
        return flash_attention_qkv(
            qkv_TXH, sequence.offsets_S, num_heads=self.num_heads, max_length=bound, scale=scale, window=self._window,
            qk_norm=True, rope=sequence.rope, schedule=sequence.plan.attention,
            backward_epilogue=self.kernels.fused_qk_backward,
        )  # fmt: skip

    def _separate(self, qkv_TXH: Tensor, sequence: Sequence) -> Tensor:
        """QK-norm, then rotation, then attention, as three steps."""
        q_TNH, k_TNH, v_TNH = qkv_TXH.chunk(3, dim=1)
        q_TNH, k_TNH = rms_norm(q_TNH, self.kernels.norm), rms_norm(k_TNH, self.kernels.norm)
        if sequence.rope is not None:
            q_TNH, k_TNH = apply_rope(q_TNH, sequence.rope), apply_rope(k_TNH, sequence.rope)
        bound, scale, plan = sequence.max_length, 1.0 / math.sqrt(self.head_dim), sequence.plan
        if self._in_fp8:
            return attention_of_tiles(q_TNH, k_TNH, v_TNH, sequence.offsets_S, bound, scale, plan.attention)
        if sequence.lengths_B is not None:
            return padded_attention(
                q_TNH, k_TNH, v_TNH, sequence.lengths_B, max_length=bound, scale=scale,
                block=self.block if self.kind == "block" else None,
                window=self.window if self.kind == "window" else None,
            )  # fmt: skip
        if self.kernels.attention == "varlen":
            assert plan.cu_attention is not None
            longest = min(self.block, bound) if self.kind == "block" else bound
            return varlen_attention(
                q_TNH, k_TNH, v_TNH, plan.cu_attention, plan.cu_attention, max_q=longest, max_k=longest, scale=scale,
                window=self.window if self.kind == "window" else None,
            )  # fmt: skip
        if self.kind == "block":
            return block_attention(
                q_TNH, k_TNH, v_TNH, sequence.offsets_S, max_length_q=bound, scale=scale, block=self.block,
                schedule=self._blocks(sequence),
            )  # fmt: skip
        return flash_attention(
            q_TNH, k_TNH, v_TNH, sequence.offsets_S, max_length_q=bound, max_length_k=bound, scale=scale,
            window=self._window, schedule=plan.attention,
        )  # fmt: skip

    def _blocks(self, sequence: Sequence) -> BlockSchedule | None:
        table_S3 = sequence.plan.blocks_S3
        return None if table_S3 is None else BlockSchedule(table_S3, self.block, sequence.s_TD.shape[0])

    @property
    def _in_fp8(self) -> bool:
        return self.kernels.attention_format == "fp8"

    @property
    def _window(self) -> tuple[int, int] | None:
        return (self.window, self.window) if self.kind == "window" else None


def _attention_of_tiles(
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    offsets_S: Tensor,
    max_length: int,
    scale: float,
    schedule: TileSchedule | None,
) -> Tensor:
    """Full attention of q, k and v rounded to FP8 in tiles of 128 rows; gradients pass the rounding unchanged."""
    from gemworks.precision.head_tiles import head_tiles

    with torch.no_grad():
        q, k = head_tiles(q_TNH, offsets_S), head_tiles(k_TNH, offsets_S)
        v = head_tiles(v_TNH, offsets_S, transposed=True)
    return flash_attention_fp8(
        q.codes, k.codes, v.codes, q.scales, k.scales, v.scales, offsets_S, max_length_q=max_length, scale=scale,
        origins=(q_TNH, k_TNH, v_TNH), dtype=v_TNH.dtype, schedule=schedule,
    )  # fmt: skip


# its codes are made by kernels that the compiler has no names for
attention_of_tiles: Callable[..., Tensor] = torch.compiler.disable(_attention_of_tiles)  # type: ignore[assignment]
