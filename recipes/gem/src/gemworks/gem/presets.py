"""The presets, and how a run's configuration comes from one: preset, then a TOML overlay, then `--set a.b=c`."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemworks.gem.config import DataConfig, EventConfig, GemConfig, ModelConfig, OptimizerConfig, TrainConfig
from gemworks.gem.typed_config import ConfigError, assignments, build, leaf_keys, merge, to_mapping
from gemworks.gem.unused_keys import refuse_unused


def tiny() -> GemConfig:
    """Tests on the CPU in seconds."""
    return GemConfig(
        preset="tiny",
        model=ModelConfig(
            dim=64,
            num_heads=2,
            num_layers=2,
            num_event_types=2,
            num_tokens=8,
            num_summary_tokens=8,
            num_seeds=8,
            num_sequence_tokens=4,
            kronecker_rank=2,
            pffn_rows=16,
            num_experts=2,
            expert_dim=64,
            wukong_rank=4,
            embedding_dim=16,
            dense_hidden_dim=64,
            mask_dim=16,
            gate_dim=16,
            head_tokens=2,
            head_hidden_dim=64,
            window=16,
        ),
        data=DataConfig(source="synthetic", batch_size=64, max_length=64, num_samples=16384),
        optimizer=OptimizerConfig(lr=3e-3, sparse_lr=3e-2, warmup_steps=20, decay="constant"),
    )


def small() -> GemConfig:
    """A laptop run on real data that learns in minutes: MovieLens-100K."""
    return GemConfig(
        preset="small",
        model=ModelConfig(
            dim=128,
            num_heads=2,
            num_layers=3,
            num_event_types=2,
            num_tokens=16,
            num_summary_tokens=8,
            num_seeds=16,
            num_sequence_tokens=4,
            kronecker_rank=4,
            pffn_rows=32,
            num_experts=2,
            expert_dim=128,
            wukong_rank=8,
            embedding_dim=32,
            dense_hidden_dim=128,
            mask_dim=32,
            gate_dim=32,
            head_hidden_dim=128,
            window=64,
            skip="alternate",
            time_scale_seconds=3600.0,
            events={"liked": EventConfig(), "other": EventConfig()},
        ),
        data=DataConfig(source="movielens", batch_size=128, max_length=256),
        # an epoch has 625 steps: two evaluations, at half and at the end, and a checkpoint a minute
        train=TrainConfig(eval_every=313, save_every=125),
    )


def base() -> GemConfig:
    """One GPU."""
    return GemConfig(
        preset="base",
        model=ModelConfig(
            dim=256,
            num_heads=4,
            num_layers=6,
            num_event_types=2,
            num_tokens=32,
            num_summary_tokens=32,
            num_seeds=64,
            num_sequence_tokens=16,
            kronecker_rank=4,
            pffn_rows=128,
            num_experts=2,
            expert_dim=512,
            wukong_rank=16,
            embedding_dim=64,
            dense_hidden_dim=256,
            mask_dim=64,
            gate_dim=64,
            head_hidden_dim=256,
        ),
        data=DataConfig(source="synthetic", batch_size=512, max_length=1024, num_samples=1 << 20),
        train=TrainConfig(dtype="bfloat16"),
    )


def large() -> GemConfig:
    """One H200, and the ladder that measures MFU: no compute skipping, so that every layer is all of a layer."""
    return GemConfig(
        preset="large",
        model=ModelConfig(
            dim=512,
            num_heads=4,
            num_layers=8,
            num_event_types=1,
            num_tokens=64,
            num_summary_tokens=32,
            num_seeds=256,
            num_sequence_tokens=32,
            kronecker_rank=8,
            pffn_rows=256,
            num_experts=4,
            expert_dim=1024,
            wukong_rank=16,
            embedding_dim=128,
            dense_hidden_dim=512,
            mask_dim=128,
            gate_dim=128,
            head_hidden_dim=512,
            reuse_hsp=False,
        ),
        data=DataConfig(source="synthetic", batch_size=1152, max_length=2048, num_samples=1 << 20, num_event_types=1),
        train=TrainConfig(dtype="bfloat16"),
    )


def frontier() -> GemConfig:
    """The published scale, thousands of GPUs: for the planner and the simulator, not to be built on one machine."""
    return GemConfig(
        preset="frontier",
        model=ModelConfig(
            dim=768,
            num_heads=6,
            num_layers=12,
            num_event_types=10,
            num_tokens=256,
            num_summary_tokens=64,
            num_seeds=256,
            num_sequence_tokens=32,
            kronecker_rank=8,
            pffn_rows=256,
            num_experts=4,
            expert_dim=1024,
            num_fmb_tokens=64,
            wukong_rank=32,
            embedding_dim=256,
            dense_hidden_dim=2048,
            mask_dim=256,
            gate_dim=256,
            head_tokens=8,
            head_hidden_dim=2048,
            reuse_hsp=True,
            skip="alternate",
        ),
        data=DataConfig(
            source="synthetic",
            batch_size=1152,
            max_length=32768,
            length_law="zipf",
            num_samples=1 << 30,
            num_event_types=10,
        ),
        optimizer=OptimizerConfig(warmup_steps=2000),
        train=TrainConfig(dtype="bfloat16"),
    )


PRESETS: Mapping[str, Callable[[], GemConfig]] = {f.__name__: f for f in (tiny, small, base, large, frontier)}


# These describe a model for the planner; no run starts from one.
PLANNER_PRESETS = ("frontier",)
RUN_PRESETS = tuple(name for name in PRESETS if name not in PLANNER_PRESETS)


def get_preset(name: str) -> GemConfig:
    """The preset of that name, of a run or for the planner.

    >>> get_preset("tiny").model.dim
    64
    >>> get_preset("tinny")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    gemworks.gem.typed_config.ConfigError: preset: got 'tinny', expected one of ...; did you mean 'tiny'?
    """
    _check_name(name, tuple(PRESETS))
    return PRESETS[name]()


def _check_name(name: str, expected: Sequence[str]) -> None:
    if name not in expected:
        near = difflib.get_close_matches(name, expected, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"preset: got {name!r}, expected one of {', '.join(expected)}{hint}")


def override(config: GemConfig, values: Mapping[str, Any]) -> GemConfig:
    """`config` with the leaves of a nested mapping on top, checked as a whole.

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type, or sizes that do not fit together.

    >>> override(get_preset("tiny"), {"model": {"num_layers": 4}}).model.num_layers
    4
    >>> override(get_preset("tiny"), {"model": {"num_layer": 4}})
    Traceback (most recent call last):
    gemworks.gem.typed_config.ConfigError: unknown key 'model.num_layer'; did you mean 'model.num_layers'?
    """
    before = to_mapping(config)
    return build(GemConfig, merge(before, values), everywhere=leaf_keys(before))


def load_config(preset: str | None = None, *, toml: str | Path | None = None, sets: Iterable[str] = ()) -> GemConfig:
    """A run's configuration: a preset, then a TOML file on top, then assignments, the last one winning.

    Args:
        preset: name of the preset; None takes the file's `preset` key, and `small` without one.
        toml: path of an overlay; it may hold any subset of the keys.
        sets: `a.b=c` texts, such as "model.events.liked.dim=64".

    Raises:
        ConfigError: a file that is missing or not TOML, a preset that is only for the planner, a setting without effect
            beside the others, or anything that `override` refuses.

    >>> config = load_config("tiny", sets=["data.batch_size=8", "train.task_weights=[1.0, 0.5]"])
    >>> config.data.batch_size, config.train.task_weights
    (8, (1.0, 0.5))
    """
    overlay: dict[str, Any] = {}
    if toml is not None:
        path = Path(toml)
        if path.is_dir():
            raise ConfigError(f"configuration file {str(path)!r} is a folder; expected the path of a TOML file")
        if not path.is_file():
            raise ConfigError(f"configuration file {str(path)!r} does not exist; expected the path of a TOML file")
        try:
            overlay = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"configuration file {str(path)!r} is not valid TOML: {error}") from error
    assigned = assignments(sets)
    if "preset" in assigned:
        raise ConfigError("preset: cannot be assigned; expected it as the preset argument or in the TOML file")
    named = overlay.pop("preset", None)
    if named is not None and not isinstance(named, str):
        raise ConfigError(f"preset: got {named!r}, expected a string, one of {', '.join(RUN_PRESETS)}")
    name = preset or named or "small"
    if name in PLANNER_PRESETS:
        raise ConfigError(
            f"preset: got {name!r}, which is for the planner only (thousands of GPUs); expected one of "
            f"{', '.join(RUN_PRESETS)}"
        )
    _check_name(name, RUN_PRESETS)
    values = merge(overlay, assigned)
    before = get_preset(name)
    config = override(before, values)
    refuse_unused(before, config, leaf_keys(values))
    return config
