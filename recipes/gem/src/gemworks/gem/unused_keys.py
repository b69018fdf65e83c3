"""Settings that the rest of a configuration makes meaningless: a user who sets one of them expects something of it."""

from __future__ import annotations

from collections.abc import Collection

from gemworks.gem.config import ConfigError, GemConfig

# data fields that only the synthetic source reads
SYNTHETIC_KEYS = ("length_law", "num_samples", "num_id_fields", "num_dense", "num_event_types", "num_event_fields")


def _used_kinds(config: GemConfig) -> set[str]:
    """The kinds of attention that some event type may have."""
    model = config.model
    own = {model.event(name).attention for name in model.events}
    return own if len(model.events) == model.num_event_types else own | {model.attention}


def _why_unused_kernel(config: GemConfig, name: str) -> str | None:
    kernels = config.kernels
    if name in ("linears_hadamard", "linears_stochastic") and kernels.linears == "bf16":
        return "kernels.linears is 'bf16', which has no recipe to change; set kernels.linears=fp8_block128 too"
    if name == "compile_scope" and not config.train.compile:
        return "train.compile is false; set train.compile=true too"
    if name == "rope_tables" and config.model.time_encoding != "rotary":
        return f"model.time_encoding is {config.model.time_encoding!r}, which rotates nothing"
    if name == "fused_qk_backward":
        over_tiles = kernels.attention == "gemworks" and kernels.attention_format == "autocast"
        attends = over_tiles and bool(_used_kinds(config) & {"full", "window"})
        pools = kernels.pooling == "gemworks" and config.model.pooling == "softmax"
        if not kernels.fused_qk or not (attends or pools):
            return (
                "keys are normed and rotated before attention's kernels; set kernels.fused_qk=true, and attention or "
                "pooling by gemworks"
            )
    return None


def why_unused(config: GemConfig, key: str) -> str | None:
    """Why a key has no effect in this configuration, with what to change; None if it has one.

    >>> from gemworks.gem.presets import get_preset
    >>> why_unused(get_preset("small"), "data.num_samples")
    "data.source is 'movielens', only 'synthetic' data reads it"
    """
    model, data = config.model, config.data
    section, _, name = key.partition(".")
    if section == "kernels":
        return _why_unused_kernel(config, name)
    if section == "data":
        if name in SYNTHETIC_KEYS and data.source != "synthetic":
            return f"data.source is {data.source!r}, only 'synthetic' data reads it"
        if name == "num_ids" and data.source in ("movielens", "parquet"):
            return f"data.source is {data.source!r}, whose tables have the sizes of its own schema"
        if name == "path" and data.source == "synthetic":
            return "data.source is 'synthetic', which reads no files; set data.source too"
        if name == "id_policy" and data.source != "parquet":
            return f"data.source is {data.source!r}, which has no ids outside its tables"
        if name == "num_lanes" and data.source in ("movielens", "synthetic"):
            return f"data.source is {data.source!r}, which has no row groups to deal to lanes"
        if name == "prefetch_threads" and data.prefetch == 0:
            return "data.prefetch is 0: batches are made by the training thread; set data.prefetch too"
        if name == "seed" and data.source != "synthetic" and data.shuffle_window == 0:
            return f"data.source is {data.source!r} and data.shuffle_window is 0: nothing is drawn at random"
    if section == "train" and name == "profile_steps" and config.train.profile_every is None:
        return "train.profile_every is none: no trace is written; set train.profile_every too"
    if section == "model":
        kinds = _used_kinds(config)
        if name == "window" and "window" not in kinds:
            return "no event type has attention 'window'; set model.attention=window too"
        if name == "block" and "block" not in kinds:
            return "no event type has attention 'block'; set model.attention=block too"
        if name == "num_time_buckets" and model.time_encoding != "buckets":
            return f"model.time_encoding is {model.time_encoding!r}; set model.time_encoding=buckets too"
        if name == "time_fraction" and model.time_encoding != "rotary":
            return f"model.time_encoding is {model.time_encoding!r}; set model.time_encoding=rotary too"
        event = name.removeprefix("events.").removesuffix(".window")
        if name == f"events.{event}.window" and event in model.events and model.event(event).attention != "window":
            return f"its attention is {model.event(event).attention!r}; set model.events.{event}.attention=window too"
    return None


def refuse_unused(before: GemConfig, after: GemConfig, given: Collection[str]) -> None:
    """Refuses a setting that changes nothing.

    Keys that a file repeats with the value that the preset has anyway are let pass: a stored configuration names all.

    Args:
        before: the preset.
        after: the preset with the settings on top.
        given: dotted keys that the user named.

    Raises:
        ConfigError: the first key without effect, and why.
    """
    values_before, values_after = before.to_mapping(), after.to_mapping()
    for key in given:
        why = why_unused(after, key)
        if why is not None and _look_up(values_before, key) != _look_up(values_after, key):
            raise ConfigError(
                f"{key}: got {_look_up(values_after, key)!r}, expected it unset: it has no effect, as {why}"
            )


def _look_up(values: object, key: str) -> object:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
