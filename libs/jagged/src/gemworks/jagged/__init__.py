"""Attention, norms and pooling on packed variable-length sequences, without padding."""

from gemworks.jagged._checks import debug_checks
from gemworks.jagged.convert import (
    from_cu_seqlens,
    from_keyed,
    from_lengths,
    from_list,
    from_nested,
    from_padded,
    from_torchrec,
    offsets_from_lengths,
    padding_mask,
    to_cu_seqlens,
    to_nested,
    to_padded,
    to_torchrec,
)
from gemworks.jagged.counting import attention_flops, num_pairs
from gemworks.jagged.dispatch import Explanation, SupportRow, explain, support
from gemworks.jagged.jagged import Jagged, next_power_of_two
from gemworks.jagged.ops.attention_fp8.op import flash_attention_fp8, gdpa_fp8
from gemworks.jagged.ops.block_attention.op import block_attention, block_attention_qkv
from gemworks.jagged.ops.block_attention.projected import block_attention_projected
from gemworks.jagged.ops.block_attention.schedule import BlockSchedule
from gemworks.jagged.ops.flash_attention.bias import AttentionBias
from gemworks.jagged.ops.flash_attention.op import flash_attention
from gemworks.jagged.ops.flash_attention.packed import flash_attention_qkv
from gemworks.jagged.ops.flash_attention.packed_pool import flash_attention_pool
from gemworks.jagged.ops.gdpa.activations import Activation
from gemworks.jagged.ops.gdpa.epilogue import NormEpilogue
from gemworks.jagged.ops.gdpa.op import gdpa
from gemworks.jagged.ops.norms.op import layer_norm, rms_norm
from gemworks.jagged.ops.pooling.op import seed_pool
from gemworks.jagged.ops.pooling.reference import kronecker_compress, last_pool, mean_pool, sum_pool
from gemworks.jagged.ops.rope.reference import Rope, RopeTables, apply_rope
from gemworks.jagged.ops.token_map.op import token_map
from gemworks.jagged.products import (
    concat,
    concat_batch,
    expand_rows,
    jagged_dense_matmul,
    jagged_dot,
    jagged_jagged_matmul,
    split,
)
from gemworks.jagged.schedule import TileSchedule

__all__ = [
    "Activation",
    "AttentionBias",
    "BlockSchedule",
    "Explanation",
    "Jagged",
    "NormEpilogue",
    "Rope",
    "RopeTables",
    "SupportRow",
    "TileSchedule",
    "apply_rope",
    "attention_flops",
    "block_attention",
    "block_attention_projected",
    "block_attention_qkv",
    "concat",
    "concat_batch",
    "debug_checks",
    "expand_rows",
    "explain",
    "flash_attention",
    "flash_attention_fp8",
    "flash_attention_pool",
    "flash_attention_qkv",
    "from_cu_seqlens",
    "from_keyed",
    "from_lengths",
    "from_list",
    "from_nested",
    "from_padded",
    "from_torchrec",
    "gdpa",
    "gdpa_fp8",
    "jagged_dense_matmul",
    "jagged_dot",
    "jagged_jagged_matmul",
    "kronecker_compress",
    "last_pool",
    "layer_norm",
    "mean_pool",
    "next_power_of_two",
    "num_pairs",
    "offsets_from_lengths",
    "padding_mask",
    "rms_norm",
    "seed_pool",
    "split",
    "sum_pool",
    "support",
    "to_cu_seqlens",
    "to_nested",
    "to_padded",
    "to_torchrec",
    "token_map",
]
