"""The whole configuration of a GEM run: frozen dataclasses, presets, TOML overlay, `--set a.b=c`.

Letters: D width, H head width, N heads, L layers, F tokens, K PFFN rows (model.md's legend).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

AttentionKind = Literal["block", "window", "full"]


@dataclass(frozen=True, kw_only=True)
class EventConfig:
    """Sizes of one event type's sequence stack; None takes the model's value."""

    dim: int | None = None
    num_heads: int | None = None
    num_seeds: int | None = None
    attention: AttentionKind | None = None
    window: int | None = None
    num_layers: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and choices of the GEM model."""

    dim: int  # D
    num_heads: int  # N; D = N * H
    num_layers: int  # L
    num_tokens: int  # F: non-sequence tokens after the token-axis map
    num_summary_tokens: int  # n_sum
    num_seeds: int  # n_seed of HSP
    num_sequence_tokens: int  # n_tok of HSP
    kronecker_rank: int  # k of HSP's compression
    pffn_rows: int  # K: keys per sample in the PFFN
    num_experts: int
    expert_dim: int  # hidden width of an expert's MLP
    wukong_rank: int  # k of X (X^T Y)
    embedding_dim: int  # width of the embedding tables
    attention: AttentionKind = "block"
    block: int = 64
    window: int = 100
    pffn_activation: str = "gelu"
    pffn_scale: float | None = None  # None: 1 / sqrt(H)
    pooling: Literal["softmax", "gdpa"] = "softmax"
    reuse_hsp: bool = True  # odd layers reuse the HSP of the layer before
    skip: Literal["none", "alternate"] = "none"  # alternate: even layers skip attention, odd layers the PFFN
    time_encoding: Literal["rotary", "buckets"] = "rotary"
    time_scale_seconds: float = 60.0
    head_dim_mlp: int = 128
    dropout: float = 0.0
    events: Mapping[str, EventConfig] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the batches come from."""

    source: Literal["movielens", "synthetic", "parquet"] = "synthetic"
    path: str | None = None  # cache or file folder
    batch_size: int = 128
    max_length: int = 256  # newest events kept per type; a power of two
    id_policy: Literal["error", "hash"] = "error"
    length_law: Literal["uniform", "uniform_0.7", "zipf"] = "uniform"
    num_samples: int = 65536  # synthetic only
    shuffle_window: int = 0  # samples; 0 keeps strict time order
    prefetch: int = 2
    # Synthetic data only: categorical fields of a sample and ids in each, float columns, event types, ids per event.
    num_id_fields: int = 8
    num_ids: int = 1000
    num_dense: int = 8
    num_event_types: int = 2
    num_event_fields: int = 2
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    sparse_lr: float = 1e-2
    warmup_steps: int = 100
    decay: Literal["constant", "cosine"] = "cosine"
    clip_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: int = 1
    max_steps: int | None = None
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"  # autocast of the dense part
    log_every: int = 20
    eval_every: int | None = None  # steps; None: at the end of each epoch
    task_weights: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class GemConfig:
    preset: str
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
