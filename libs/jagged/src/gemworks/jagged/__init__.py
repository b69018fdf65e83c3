"""Attention, norms and pooling on packed variable-length sequences, without padding."""

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
from gemworks.jagged.jagged import Jagged, next_power_of_two
from gemworks.jagged.ops.block_attention.op import block_attention
from gemworks.jagged.ops.flash_attention.bias import AttentionBias
from gemworks.jagged.ops.flash_attention.op import flash_attention
from gemworks.jagged.ops.gdpa.op import gdpa
from gemworks.jagged.ops.norms.op import layer_norm, rms_norm
from gemworks.jagged.ops.pooling.op import seed_pool
from gemworks.jagged.ops.pooling.reference import kronecker_compress, last_pool, mean_pool, sum_pool
from gemworks.jagged.ops.rope.reference import Rope, RopeTables, apply_rope
