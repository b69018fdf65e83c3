"""The whole configuration of a GEM run, and what its sections demand of each other. A section's fields and their own
checks are in a file of its name; sizes per preset are in `presets.py`.

Imports no torch, so that a command line can print a configuration quickly.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from typing import Any

from gemworks.gem.config_checks import check
from gemworks.gem.data_config import DataConfig
from gemworks.gem.kernels import KernelConfig
from gemworks.gem.model_config import Activation, AttentionKind, EventConfig, EventSizes, ModelConfig
from gemworks.gem.parallel_config import ParallelConfig
from gemworks.gem.train_config import OptimizerConfig, TrainConfig
from gemworks.gem.typed_config import ConfigError, build, to_mapping, to_toml

__all__ = [
    "Activation",
    "AttentionKind",
    "ConfigError",
    "DataConfig",
    "EventConfig",
    "EventSizes",
    "GemConfig",
    "KernelConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainConfig",
]


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
        check(
            self.model.num_experts % self.parallel.experts == 0,
            "parallel.experts",
            self.parallel.experts,
            f"a divisor of model.num_experts = {self.model.num_experts}: every rank computes equally many",
        )
        check(
            self.parallel.experts == 1 or self.kernels.experts == "separate",
            "kernels.experts",
            self.kernels.experts,
            f"'separate', as parallel.experts is {self.parallel.experts}: spread experts compute one after the other",
        )
        check(
            self.parallel.gather == "stored" or self.train.dtype == "bfloat16",
            "parallel.gather",
            self.parallel.gather,
            f"'stored', as train.dtype is {self.train.dtype!r}; or set train.dtype=bfloat16 too",
        )
        check(
            self.parallel.gather != "fp8" or self.kernels.linears != "bf16",
            "parallel.gather",
            self.parallel.gather,
            "'stored' or 'bfloat16', as kernels.linears is 'bf16'; or set kernels.linears=fp8_block128 too",
        )
        check(
            self.data.source != "synthetic" or self.data.num_event_types == self.model.num_event_types,
            "data.num_event_types",
            self.data.num_event_types,
            f"model.num_event_types = {self.model.num_event_types}; set both",
        )
        check(
            self.kernels.experts == "separate" or self.model.expert_layers == 1,
            "model.expert_layers",
            self.model.expert_layers,
            "1 with kernels.experts='batched': deeper experts have inputs of their own",
        )
        check(
            self.kernels.experts == "separate" or self.parallel.experts == 1,
            "parallel.experts",
            self.parallel.experts,
            "1 with kernels.experts='batched': a rank computes the experts that it holds one after another",
        )
        check(
            self.kernels.attention_format == "autocast" or self.model.only_full_attention,
            "kernels.attention_format",
            self.kernels.attention_format,
            "'autocast', as some event type's attention is not 'full'; FP8 codes have kernels for full attention only",
        )
        self._check_compiled()
        check(
            self.train.graph_memory == "own" or self.train.cuda_graphs,
            "train.graph_memory",
            self.train.graph_memory,
            "'own', as train.cuda_graphs is false and there are no graphs to share it; or set train.cuda_graphs=true",
        )
        if self.train.cuda_graphs:
            self._check_cuda_graphs()

    def _check_compiled(self) -> None:
        """Refuses what would have no effect without the compiler."""
        check(
            self.kernels.compile_saves == "usual" or self.train.compile,
            "kernels.compile_saves",
            self.kernels.compile_saves,
            "'usual', as train.compile is false and it is the compiler that keeps less; or set train.compile=true",
        )
        check(
            self.kernels.activations != "recompute@0.5" or self.train.compile,
            "kernels.activations",
            self.kernels.activations,
            "another policy such as 'recompute', as train.compile is false and it is the compiler that a layer's "
            "budget is for; or set train.compile=true",
        )

    def _check_cuda_graphs(self) -> None:
        """Refuses what a replayed graph would not do: anything that the host decides anew in every step."""
        kernels = self.kernels
        check(
            self.optimizer.state_place == "device",
            "optimizer.state_place",
            self.optimizer.state_place,
            "'device', as train.cuda_graphs is true: graphs keep the memory that they compute in, so nothing could use "
            "what parked state leaves; or set train.cuda_graphs=false",
        )
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
