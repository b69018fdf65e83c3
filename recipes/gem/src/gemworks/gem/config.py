"""The whole configuration of a GEM run: frozen dataclasses that check themselves. Sizes per preset are in `presets.py`.

Letters: B samples, D width, N heads, H head width, L layers, F tokens, K PFFN rows, E event types, S = B + 1 offsets.
Imports no torch, so that a command line can print a configuration quickly.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from gemworks.gem.kernels import KernelConfig
from gemworks.gem.parallel_config import ParallelConfig
from gemworks.gem.typed_config import ConfigError, build, to_mapping, to_toml

AttentionKind = Literal["block", "window", "full"]
# The activations of gemworks.jagged.gdpa, spelled out because importing them would import torch.
Activation = Literal[
    "identity",
    "relu",
    "squared_relu",
    "leaky_relu",
    "gelu",
    "gelu_tanh",
    "fast_gelu",
    "silu",
    "fast_silu",
    "hardswish",
    "tanh",
]


def _check(condition: bool, key: str, got: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: got {got!r}, expected {expected}")


def _check_finite(config: Any, section: str) -> None:
    """Refuses infinity and NaN in every float of a dataclass, in tuples of them too."""
    for item in fields(config):
        value = getattr(config, item.name)
        numbers = value if isinstance(value, tuple) else (value,)
        finite = all(math.isfinite(number) for number in numbers if isinstance(number, float))
        _check(finite, f"{section}.{item.name}", value, "a finite number")


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _check_heads(prefix: str, dim: int, num_heads: int) -> None:
    _check(num_heads > 0, f"{prefix}.num_heads", num_heads, "a positive number of heads")
    _check(
        dim > 0 and dim % num_heads == 0,
        f"{prefix}.dim",
        dim,
        f"heads * head width: a multiple of {prefix}.num_heads = {num_heads}",
    )
    head_dim = dim // num_heads
    fix = f"set {prefix}.dim to {prefix}.num_heads times a power of two"
    _check(
        _is_power_of_two(head_dim) and 8 <= head_dim <= 256, f"{prefix}.dim", dim, f"a head width of 8 to 256; {fix}"
    )


@dataclass(frozen=True, kw_only=True)
class EventConfig:
    """Sizes of one event type's sequence stack; None takes the model's value.

    Attributes:
        dim: width of this type's tokens; num_heads * head width.
        num_heads: heads of its attention, PFFN and seed pooling.
        num_seeds: seeds of its hierarchical seed pooling.
        num_sequence_tokens: tokens its Kronecker compression leaves.
        attention: its kind of self-attention.
        window: keys on each side of a query when attention is "window".
        num_layers: depth. Layers past it leave this type's events alone and reuse its last seed pooling.
    """

    dim: int | None = None
    num_heads: int | None = None
    num_seeds: int | None = None
    num_sequence_tokens: int | None = None
    attention: AttentionKind | None = None
    window: int | None = None
    num_layers: int | None = None


@dataclass(frozen=True, kw_only=True)
class EventSizes:
    """The sizes of one event type with every default filled in."""

    dim: int
    num_heads: int
    num_seeds: int
    num_sequence_tokens: int
    attention: AttentionKind
    window: int
    num_layers: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and choices of the GEM model.

    Attributes:
        dim: D, the width of tokens; D = num_heads * head width.
        num_heads: N.
        num_layers: L.
        num_event_types: E; a schema with another number is refused.
        num_tokens: F, the non-sequence tokens after the token-axis map over the features.
        num_summary_tokens: n_sum, rows of the non-sequence summary.
        num_seeds: n_seed of hierarchical seed pooling (HSP).
        num_sequence_tokens: n_tok that HSP's Kronecker compression leaves per event type.
        kronecker_rank: k, terms of that compression.
        pffn_rows: K, keys per sample in the PFFN (its hidden width; "dff" elsewhere).
        num_experts: Wukong experts of a layer; their outputs are summed with learned scalar gates.
        expert_layers: Wukong layers inside one expert.
        expert_dim: hidden width of an expert's MLP.
        wukong_rank: k of X (X^T Y).
        num_fmb_tokens: output tokens of a Wukong layer that come from the factorisation machine block; the others are
            linear combinations of its inputs. None: half of them.
        embedding_dim: width of the embedding tables.
        num_dense_tokens: tokens made from the dense columns by one MLP.
        dense_hidden_dim: hidden width of that MLP.
        mask_dim: hidden width of the MaskNet gate that merges an event's embeddings.
        gate_dim: hidden width of the summary gate's MLP, x * sigmoid(mlp(x)).
        head_tokens: tokens into which the head maps the last layer's tokens before its MLP.
        head_hidden_dim: hidden width of the head's MLP.
        attention: self-attention inside fixed blocks, in a sliding window, or over the whole sequence.
        block: tokens in a block of block attention.
        window: keys on each side of a query when attention is "window".
        pffn_activation: the activation of the PFFN.
        pffn_scale: the constant scale inside that activation: 1 / sqrt(H), 1 / data.max_length, or a number.
        pooling: seeds attend by softmax, or by GDPA with the PFFN's activation.
        reuse_hsp: odd layers reuse the seed pooling of the layer before.
        skip: "alternate": even layers skip self-attention, odd layers skip the PFFN.
        time_encoding: rotary on position and log(1 + dt / scale), or learned tables of both in buckets.
        time_fraction: share of a head's rotary pairs that turn by time; the others turn by position.
        time_scale_seconds: the scale of that logarithm.
        num_time_buckets: rows of the time and position tables when time_encoding is "buckets".
        dropout: probability, on merged events, non-sequence tokens and hidden units of the head; 0 turns it off.
        events: sizes per event type, by its name in the schema.
    """

    dim: int
    num_heads: int
    num_layers: int
    num_event_types: int
    num_tokens: int
    num_summary_tokens: int
    num_seeds: int
    num_sequence_tokens: int
    kronecker_rank: int
    pffn_rows: int
    num_experts: int
    expert_dim: int
    wukong_rank: int
    embedding_dim: int
    dense_hidden_dim: int
    mask_dim: int
    gate_dim: int
    head_hidden_dim: int
    num_dense_tokens: int = 4
    expert_layers: int = 1
    num_fmb_tokens: int | None = None
    head_tokens: int = 4
    attention: AttentionKind = "block"
    block: int = 64
    window: int = 100
    pffn_activation: Activation = "gelu"
    pffn_scale: float | Literal["head_dim", "max_length"] = "head_dim"
    pooling: Literal["softmax", "gdpa"] = "softmax"
    reuse_hsp: bool = True
    skip: Literal["none", "alternate"] = "none"
    time_encoding: Literal["rotary", "buckets"] = "rotary"
    time_fraction: float = 0.5
    time_scale_seconds: float = 60.0
    num_time_buckets: int = 64
    dropout: float = 0.0
    events: Mapping[str, EventConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_heads("model", self.dim, self.num_heads)
        counts = (
            "num_layers num_event_types num_tokens num_summary_tokens num_seeds num_sequence_tokens kronecker_rank "
            "pffn_rows num_experts expert_layers expert_dim wukong_rank embedding_dim mask_dim gate_dim head_tokens "
            "num_dense_tokens dense_hidden_dim head_hidden_dim window num_time_buckets"
        )
        for name in counts.split():
            _check(getattr(self, name) > 0, f"model.{name}", getattr(self, name), "a positive integer")
        _check(self.block in (32, 64, 128), "model.block", self.block, "32, 64 or 128")
        if isinstance(self.pffn_scale, float):
            _check(self.pffn_scale > 0, "model.pffn_scale", self.pffn_scale, "a positive number")
        _check(self.time_scale_seconds > 0, "model.time_scale_seconds", self.time_scale_seconds, "a positive number")
        _check(0 <= self.time_fraction <= 1, "model.time_fraction", self.time_fraction, "a share in [0, 1]")
        _check(0 <= self.dropout < 1, "model.dropout", self.dropout, "a probability in [0, 1)")
        _check(
            len(self.events) <= self.num_event_types,
            "model.events",
            sorted(self.events),
            f"at most model.num_event_types = {self.num_event_types} event types",
        )
        _check(
            self.num_fmb_tokens is None or self.num_fmb_tokens > 0,
            "model.num_fmb_tokens",
            self.num_fmb_tokens,
            "a positive integer, or 'none' for half of the tokens",
        )
        _check(
            self.num_sequence_tokens <= self.num_seeds,
            "model.num_sequence_tokens",
            self.num_sequence_tokens,
            f"at most model.num_seeds = {self.num_seeds}: the compression leaves fewer tokens than there are seeds",
        )
        for name in self.events:
            self._check_event(name)
        _check_finite(self, "model")

    def _check_event(self, name: str) -> None:
        sizes, prefix = self.event(name), f"model.events.{name}"
        _check_heads(prefix, sizes.dim, sizes.num_heads)
        for key in ("num_seeds", "num_sequence_tokens", "window", "num_layers"):
            _check(getattr(sizes, key) > 0, f"{prefix}.{key}", getattr(sizes, key), "a positive integer")
        _check(
            sizes.num_sequence_tokens <= sizes.num_seeds,
            f"{prefix}.num_sequence_tokens",
            sizes.num_sequence_tokens,
            f"at most its num_seeds = {sizes.num_seeds}",
        )
        _check(
            sizes.num_layers <= self.num_layers,
            f"{prefix}.num_layers",
            sizes.num_layers,
            f"at most model.num_layers = {self.num_layers}",
        )

    @property
    def head_dim(self) -> int:
        """H."""
        return self.dim // self.num_heads

    @property
    def only_full_attention(self) -> bool:
        """Whether every event type has full attention, also those that `events` does not name."""
        return self.attention == "full" and all(self.event(name).attention == "full" for name in self.events)

    def event(self, name: str) -> EventSizes:
        """The sizes of one event type: its own where given, otherwise the model's."""
        own = self.events.get(name, EventConfig())

        def pick(key: str) -> Any:
            value = getattr(own, key)
            return getattr(self, key) if value is None else value

        return EventSizes(
            dim=pick("dim"),
            num_heads=pick("num_heads"),
            num_seeds=pick("num_seeds"),
            num_sequence_tokens=pick("num_sequence_tokens"),
            attention=pick("attention"),
            window=pick("window"),
            num_layers=pick("num_layers"),
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the batches come from.

    Attributes:
        source: the reader.
        path: cache or file folder; files of kuairand, criteo and taobao are prepared once, in `.gemworks` beside them.
        batch_size: samples of a batch, over all ranks together, which share it evenly: a configuration means the same
            steps whatever the number of ranks.
        eval_batch_size: samples of a batch of an evaluation, on each rank; None: batch_size.
        max_length: newest events kept per event type; a power of two.
        id_policy: what to do with an id outside its table.
        length_law: lengths of synthetic histories: uniform on [1, max], uniform on [0.4 max, max], or Zipf 1.2.
        num_samples: samples of the synthetic source.
        shuffle_window: samples among which the order is random; 0 keeps strict time order.
        prefetch: batches prepared ahead.
        prefetch_threads: threads that prepare them.
        num_lanes: groups into which the row groups of a parquet source are dealt, so that a rank decodes its own only:
            a multiple of the number of ranks that divides the samples of a step; 1 turns it off.
        balance_window: training steps among which samples are dealt so that batches hold about as many events each; 0
            leaves them as they come.
        num_id_fields: categorical fields of a synthetic sample.
        num_ids: ids in each of them; of kuairand, criteo and taobao the rows of each table into which ids are hashed.
        num_dense: float columns of a synthetic sample.
        num_event_types: event types of synthetic data; equal to model.num_event_types.
        num_event_fields: ids of a synthetic event.
        seed: of synthetic data and of shuffling.
    """

    source: Literal["movielens", "synthetic", "parquet", "kuairand", "criteo", "taobao"] = "synthetic"
    path: str | None = None
    batch_size: int = 128
    eval_batch_size: int | None = None
    max_length: int = 256
    id_policy: Literal["error", "hash"] = "error"
    length_law: Literal["uniform", "uniform_0.7", "zipf"] = "uniform"
    num_samples: int = 65536
    shuffle_window: int = 0
    prefetch: int = 2
    prefetch_threads: int = 2
    num_lanes: int = 1
    balance_window: int = 0
    num_id_fields: int = 8
    num_ids: int = 1000
    num_dense: int = 8
    num_event_types: int = 2
    num_event_fields: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "num_samples",
            "num_ids",
            "num_event_types",
            "num_event_fields",
            "prefetch_threads",
            "num_lanes",
        ):
            _check(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "a positive integer")
        _check(
            self.eval_batch_size is None or self.eval_batch_size > 0,
            "data.eval_batch_size",
            self.eval_batch_size,
            "a positive integer or 'none'",
        )
        _check(_is_power_of_two(self.max_length), "data.max_length", self.max_length, "a power of two such as 256")
        for name in ("shuffle_window", "balance_window", "prefetch", "num_id_fields", "num_dense", "seed"):
            _check(getattr(self, name) >= 0, f"data.{name}", getattr(self, name), "an integer, 0 or more")
        _check(
            self.source != "synthetic" or self.num_samples >= 8,
            "data.num_samples",
            self.num_samples,
            "at least 8: the validation and test parts have an eighth of it each",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW for the dense part, row-wise Adagrad for the tables.

    Attributes:
        lr: peak learning rate of the dense part.
        weight_decay: of the dense part.
        betas: of AdamW.
        sparse_lr: learning rate of the embedding tables.
        warmup_steps: steps of linear warm-up.
        decay: shape of the schedule after the warm-up.
        clip_norm: largest norm of the dense gradient.
        state_place: where AdamW's two moments are between steps: on the device, or parked in the host's memory
            (gemworks.netmem), which the step waits for twice. One process only.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    sparse_lr: float = 1e-2
    warmup_steps: int = 100
    decay: Literal["constant", "cosine"] = "cosine"
    clip_norm: float = 1.0
    state_place: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        for name in ("lr", "sparse_lr", "clip_norm"):
            value = getattr(self, name)
            _check(value > 0, f"optimizer.{name}", value, "a positive number")
        _check(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "a number, 0 or more")
        _check(all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas, "two numbers in [0, 1)")
        _check(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "an integer, 0 or more")
        _check_finite(self, "optimizer")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, where, and what to report.

    Attributes:
        epochs: passes over the training part.
        max_steps: stop earlier after this many steps.
        seed: of initialisation and dropout.
        device: "auto" takes a GPU if there is one.
        dtype: autocast dtype of the dense part.
        log_every: steps between two log lines.
        eval_every: steps between two evaluations; None: at the end of each epoch.
        task_weights: weight of each task's loss; None: all 1.
        accumulate: batches per step; the dense gradient is the mean over the samples of all of them.
        compile: torch.compile of feature tokens, interactions, gates and the head's MLP, or of what
            `kernels.compile_scope` names.
        cuda_graphs: forward and backward of everything but the tables are replayed as CUDA graphs, one per bucket of
            packed rows; the batch is padded to its bucket with samples that no loss sees. On a CPU it is only padded.
        graph_memory: "own": every graph keeps its own inputs and gradients (of the dense parameters, 4 bytes each, and
            of the tables' rows); "shared": all read and write the same, and one graph more costs next to nothing.
        save_every: steps between two checkpoints; None: after each evaluation.
        keep_last: newest checkpoints kept beside the best one.
        max_skipped: steps with a loss or gradient that is not finite are skipped, up to this many in a run.
        spike_factor: a loss above this multiple of its running mean is logged as a spike.
        profile_every: steps between two profiler traces; None: none.
        profile_steps: steps in a trace.
        memory_history: remembers where GPU memory was allocated, for the snapshot that running out of it writes.
        rank_timeout_seconds: of several processes: how long a collective waits for a rank that does not come, before
            the run stops and says which it is. A rank that dies is noticed at once.
        wandb_project: project of Weights & Biases to report to as well; its WANDB_MODE=offline works.
    """

    epochs: int = 1
    max_steps: int | None = None
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    log_every: int = 20
    eval_every: int | None = None
    task_weights: tuple[float, ...] | None = None
    accumulate: int = 1
    compile: bool = False
    cuda_graphs: bool = False
    graph_memory: Literal["own", "shared"] = "own"
    save_every: int | None = None
    keep_last: int = 2
    max_skipped: int = 10
    spike_factor: float = 3.0
    profile_every: int | None = None
    profile_steps: int = 2
    memory_history: bool = False
    rank_timeout_seconds: int = 300
    wandb_project: str | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "log_every", "accumulate", "keep_last", "profile_steps", "rank_timeout_seconds"):
            _check(getattr(self, name) > 0, f"train.{name}", getattr(self, name), "a positive integer")
        _check(self.max_skipped >= 0, "train.max_skipped", self.max_skipped, "an integer, 0 or more")
        _check(self.spike_factor > 1, "train.spike_factor", self.spike_factor, "a number above 1")
        _check(
            self.profile_every is None or self.profile_every > self.profile_steps,
            "train.profile_every",
            self.profile_every,
            f"more than train.profile_steps = {self.profile_steps}, or 'none'",
        )
        for name in ("max_steps", "eval_every", "save_every"):
            value = getattr(self, name)
            _check(value is None or value > 0, f"train.{name}", value, "a positive integer or 'none'")
        weights = self.task_weights
        _check(
            weights is None or (len(weights) > 0 and all(w >= 0 for w in weights) and sum(weights) > 0),
            "train.task_weights",
            weights,
            "one number per task, 0 or more, not all 0",
        )
        _check_finite(self, "train")


@dataclass(frozen=True, kw_only=True)
class GemConfig:
    """One run, completely: `preset` names where its sizes came from."""

    preset: str
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        _check(
            self.model.num_experts % self.parallel.experts == 0,
            "parallel.experts",
            self.parallel.experts,
            f"a divisor of model.num_experts = {self.model.num_experts}: every rank computes equally many",
        )
        _check(
            self.parallel.experts == 1 or self.kernels.experts == "separate",
            "kernels.experts",
            self.kernels.experts,
            f"'separate', as parallel.experts is {self.parallel.experts}: spread experts compute one after the other",
        )
        _check(
            self.parallel.gather == "stored" or self.train.dtype == "bfloat16",
            "parallel.gather",
            self.parallel.gather,
            f"'stored', as train.dtype is {self.train.dtype!r}; or set train.dtype=bfloat16 too",
        )
        _check(
            self.parallel.gather != "fp8" or self.kernels.linears != "bf16",
            "parallel.gather",
            self.parallel.gather,
            "'stored' or 'bfloat16', as kernels.linears is 'bf16'; or set kernels.linears=fp8_block128 too",
        )
        _check(
            self.data.source != "synthetic" or self.data.num_event_types == self.model.num_event_types,
            "data.num_event_types",
            self.data.num_event_types,
            f"model.num_event_types = {self.model.num_event_types}; set both",
        )
        _check(
            self.kernels.experts == "separate" or self.model.expert_layers == 1,
            "model.expert_layers",
            self.model.expert_layers,
            "1 with kernels.experts='batched': deeper experts have inputs of their own",
        )
        _check(
            self.kernels.experts == "separate" or self.parallel.experts == 1,
            "parallel.experts",
            self.parallel.experts,
            "1 with kernels.experts='batched': a rank computes the experts that it holds one after another",
        )
        _check(
            self.kernels.attention_format == "autocast" or self.model.only_full_attention,
            "kernels.attention_format",
            self.kernels.attention_format,
            "'autocast', as some event type's attention is not 'full'; FP8 codes have kernels for full attention only",
        )
        if self.train.cuda_graphs:
            self._check_cuda_graphs()

    def _check_cuda_graphs(self) -> None:
        """Refuses what a replayed graph would not do: anything that the host decides anew in every step."""
        kernels = self.kernels
        for key, value, fine in (
            ("kernels.layout", kernels.layout, kernels.layout == "jagged"),
            ("kernels.activations", kernels.activations, kernels.activations in ("keep", "recompute")),
            ("kernels.linears_stochastic", kernels.linears_stochastic, not kernels.linears_stochastic),
            ("model.dropout", self.model.dropout, self.model.dropout == 0),
        ):
            if not fine:
                raise ConfigError(
                    f"train.cuda_graphs: got True with {key} {value!r}, which a graph would not draw or move anew in "
                    f"every step; set train.cuda_graphs=false, or leave {key} at its default"
                )

    def to_mapping(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        return to_mapping(self)

    def to_toml(self) -> str:
        """Every field as TOML; `GemConfig.from_toml` of it is equal to this configuration."""
        return to_toml(self)

    @staticmethod
    def from_toml(text: str) -> GemConfig:
        """The configuration that `to_toml` printed.

        Raises:
            ConfigError: not TOML, a missing or unknown key, or a wrong value.
        """
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"configuration is not valid TOML: {error}") from error
        return build(GemConfig, values)

    def with_data(self, **changes: Any) -> GemConfig:
        """This configuration with other data fields, checked again."""
        return replace(self, data=replace(self.data, **changes))

    def with_model(self, **changes: Any) -> GemConfig:
        """This configuration with other model fields, checked again."""
        return replace(self, model=replace(self.model, **changes))

    def with_kernels(self, **changes: Any) -> GemConfig:
        """This configuration with other kernels, checked again."""
        return replace(self, kernels=replace(self.kernels, **changes))

    def with_parallel(self, **changes: Any) -> GemConfig:
        """This configuration spread otherwise, checked again."""
        return replace(self, parallel=replace(self.parallel, **changes))
