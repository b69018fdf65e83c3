"""Presets, overlays, assignments, and what is said about wrong ones."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from typing import get_args

import pytest
from gemworks.gem.config import EventConfig, GemConfig
from gemworks.gem.presets import PRESETS, RUN_PRESETS, get_preset, load_config, override
from gemworks.gem.typed_config import ConfigError
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.reference


@pytest.mark.parametrize(
    ("name", "dim", "heads", "layers", "max_length", "batch"),
    [
        ("tiny", 64, 2, 2, 64, 64),
        ("small", 128, 2, 3, 256, 128),
        ("base", 256, 4, 6, 1024, 512),
        ("large", 512, 4, 8, 2048, 1152),
    ],
)
def test_presets_have_the_documented_sizes(name: str, dim: int, heads: int, layers: int, max_length: int, batch: int):
    config = get_preset(name)
    assert (config.model.dim, config.model.num_heads, config.model.num_layers) == (dim, heads, layers)
    assert (config.data.max_length, config.data.batch_size, config.preset) == (max_length, batch, name)


def test_small_uses_all_of_the_model():
    model = get_preset("small").model
    assert set(model.events) == {"liked", "other"}
    assert (model.num_event_types, model.num_experts, model.skip, model.reuse_hsp) == (2, 2, "alternate", True)
    assert model.attention == "block"
    assert model.kronecker_rank >= 2


@pytest.mark.parametrize("name", PRESETS)
def test_toml_round_trips(name: str):
    config = override(get_preset(name), {"data": {"path": 'a "quoted"\\path\n'}, "train": {"task_weights": [1, 0.25]}})
    text = config.to_toml()
    assert GemConfig.from_toml(text) == config
    assert 'max_steps = "none"' in text


@settings(max_examples=30, deadline=None)
@given(lr=st.floats(1e-30, 1e30), steps=st.none() | st.integers(1, 1 << 40), path=st.text() | st.none())
def test_any_value_round_trips(lr: float, steps: int | None, path: str | None):
    if path == "none":
        path = None
    config = override(
        get_preset("tiny"), {"optimizer": {"lr": lr}, "train": {"max_steps": steps}, "data": {"path": path}}
    )
    assert GemConfig.from_toml(config.to_toml()) == config


def test_toml_overlay_then_assignments(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "base"\n[model]\ndim = 128\nnum_heads = 2\n[model.events.view]\nnum_layers = 2\n')
    config = load_config(toml=file, sets=["model.events.view.dim=64", "data.batch_size=32", "train.max_steps=none"])
    assert config.preset == "base"
    assert (config.model.dim, config.model.num_heads, config.data.batch_size) == (128, 2, 32)
    assert config.model.events["view"] == EventConfig(dim=64, num_layers=2)
    assert config.model.event("view").num_heads == 2
    assert load_config("tiny", toml=file).preset == "tiny"
    assert load_config().preset == "small"


def test_assignments_read_types():
    config = load_config(
        "tiny",
        sets=[
            "train.task_weights=[1, 0.5]",
            "optimizer.lr=1",
            "model.reuse_hsp=false",
            "data.source=parquet",
            "data.path=/some where/x",
            "train.max_steps=7",
            "model.pffn_scale=0.01",
            "optimizer.betas=[0.8, 0.9]",
        ],
    )
    assert config.train.task_weights == (1.0, 0.5)
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.model.reuse_hsp is False
    assert (config.data.path, config.train.max_steps) == ("/some where/x", 7)
    assert (config.model.pffn_scale, config.optimizer.betas) == (0.01, (0.8, 0.9))
    assert load_config("tiny", sets=["model.pffn_scale=max_length"]).model.pffn_scale == "max_length"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.dmi=3", "unknown key 'model.dmi'; did you mean 'model.dim'"),
        ("dim=3", "unknown key 'dim'; did you mean 'model.dim'"),
        ("modl.dim=3", "unknown key 'modl'; did you mean 'model'"),
        (
            "model.events.liked.width=3",
            "unknown key 'model.events.liked.width'; did you mean 'model.events.liked.window'",
        ),
        ("model.dim=wide", "model.dim: got 'wide', expected an integer"),
        ("model.dim=64.0", "model.dim: got 64.0, expected an integer"),
        ("model.num_layers=true", "model.num_layers: got True, expected an integer"),
        ("model.reuse_hsp=1", "model.reuse_hsp: got 1, expected true or false"),
        ("model.attention=blok", "model.attention: got 'blok', expected one of 'block'.*did you mean 'block'"),
        ("train.max_steps=many", "train.max_steps: got 'many', expected an integer or 'none'"),
        ("train.task_weights=[1, 'a']", "train.task_weights: got .*expected a list of numbers or 'none'"),
        ("optimizer.betas=[1.0]", "optimizer.betas: got .*expected a list of 2 numbers"),
        ("model=3", "model: got 3, expected a table"),
        ("model.events=3", "model.events: got 3, expected a table"),
        ("model.dim", "cannot read the setting 'model.dim'; expected KEY=VALUE"),
        ("=3", "cannot read the setting"),
        ("model.dim=100", "model.dim: got 100, expected a head width of 8 to 256"),
        ("model.num_heads=3", "model.dim: got 64, expected heads . head width: a multiple of model.num_heads = 3"),
        ("model.events.click.dim=65", "model.events.click.dim: got 65, expected heads"),
        ("model.events.click.num_layers=9", "model.events.click.num_layers: got 9, expected at most"),
        ("model.num_sequence_tokens=9", "model.num_sequence_tokens: got 9, expected at most model.num_seeds = 8"),
        ("model.block=48", "model.block: got 48, expected 32, 64 or 128"),
        ("model.time_fraction=1.5", "model.time_fraction: got 1.5, expected a share in"),
        ("model.dropout=1.0", "model.dropout: got 1.0, expected a probability"),
        ("data.max_length=100", "data.max_length: got 100, expected a power of two"),
        ("data.batch_size=0", "data.batch_size: got 0, expected a positive integer"),
        ("optimizer.lr=nan", "optimizer.lr: got nan, expected a positive number"),
        ("optimizer.lr=inf", "optimizer.lr: got inf, expected a finite number"),
        ("optimizer.weight_decay=inf", "optimizer.weight_decay: got inf, expected a finite number"),
        ("model.time_scale_seconds=inf", "model.time_scale_seconds: got inf, expected a finite number"),
        ("model.pffn_scale=inf", "model.pffn_scale: got inf, expected a finite number"),
        ("train.task_weights=[1.0, inf]", "train.task_weights: got .*expected a finite number"),
        ("data.num_samples=4", "data.num_samples: got 4, expected at least 8: the validation and test parts"),
        ("train.task_weights=[]", "train.task_weights: got .*expected one number per task"),
        ("model.num_event_types=3", "data.num_event_types: got 2, expected model.num_event_types = 3; set both"),
        ("preset=small", "preset: cannot be assigned"),
        ("model.num_fmb_tokens=0", "model.num_fmb_tokens: got 0, expected a positive integer, or 'none'"),
        ("data.eval_batch_size=0", "data.eval_batch_size: got 0, expected a positive integer or 'none'"),
        ("data.prefetch=-1", "data.prefetch: got -1, expected an integer, 0 or more"),
        ("optimizer.warmup_steps=-1", "optimizer.warmup_steps: got -1, expected an integer, 0 or more"),
        ("train.eval_every=0", "train.eval_every: got 0, expected a positive integer or 'none'"),
        ("train.max_skipped=-1", "train.max_skipped: got -1, expected an integer, 0 or more"),
        ("train.spike_factor=1.0", "train.spike_factor: got 1.0, expected a number above 1"),
        ("train.profile_every=2", "train.profile_every: got 2, expected more than train.profile_steps = 2"),
        ("kernels.linears_min_features=0", "kernels.linears_min_features: got 0, expected a positive integer"),
        ("parallel.shard=0", "parallel.shard: got 0, expected a positive integer or 'none'"),
        ("parallel.min_shard_numel=-1", "parallel.min_shard_numel: got -1, expected an integer, 0 or more"),
        ("parallel.keep_gib=-1", "parallel.keep_gib: got -1.0, expected a number of GiB, 0 or more"),
    ],
)
def test_wrong_settings_name_the_key_and_the_fix(setting: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config("tiny", sets=[setting])


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"configuration file '.*absent.toml' does not exist"):
        load_config(toml=tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"configuration file '.*' is a folder; expected the path of a TOML file"):
        load_config(toml=tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("model = [")
    with pytest.raises(ConfigError, match=r"configuration file '.*broken.toml' is not valid TOML"):
        load_config(toml=broken)
    broken.write_text("preset = 3")
    with pytest.raises(ConfigError, match="preset: got 3, expected a string"):
        load_config(toml=broken)
    with pytest.raises(ConfigError, match=r"missing key 'model'"):
        GemConfig.from_toml('preset = "tiny"')
    with pytest.raises(ConfigError, match="not valid TOML"):
        GemConfig.from_toml("[")


def test_planner_presets_start_no_run(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "frontier"')
    for arguments in ({"preset": "frontier"}, {"toml": file}):
        with pytest.raises(
            ConfigError, match=r"'frontier', which is for the planner only.*one of tiny, small, base, large"
        ):
            load_config(**arguments)
    with pytest.raises(ConfigError, match=r"got 'medium', expected one of tiny, small, base, large$"):
        load_config("medium")
    assert set(PRESETS) - set(RUN_PRESETS) == {"frontier"}


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        ("small", ["data.num_samples=100"], "data.num_samples: got 100.*no effect.*'movielens', only 'synthetic'"),
        ("small", ["data.length_law=zipf"], "data.length_law: got 'zipf'.*no effect"),
        ("small", ["data.num_ids=7"], "data.num_ids: got 7.*no effect.*sizes of its own schema"),
        ("small", ["data.id_policy=hash"], "data.id_policy: got 'hash'.*no effect"),
        ("small", ["data.seed=1"], "data.seed: got 1.*no effect.*data.shuffle_window is 0"),
        ("tiny", ["data.path=x"], "data.path: got 'x'.*no effect.*set data.source too"),
        ("tiny", ["data.num_lanes=4"], "data.num_lanes: got 4.*no effect.*'synthetic', which has no row groups"),
        ("tiny", ["data.prefetch=0", "data.prefetch_threads=3"], "data.prefetch_threads: got 3.*set data.prefetch too"),
        ("small", ["data.source=taobao", "data.path=x", "data.id_policy=hash"], "data.id_policy.*has no ids outside"),
        ("tiny", ["train.profile_steps=3"], "train.profile_steps: got 3.*no trace is written; set train.profile_every"),
        ("tiny", ["model.window=7"], "model.window: got 7.*no effect.*set model.attention=window too"),
        ("tiny", ["model.attention=full", "model.block=32"], "model.block: got 32.*no effect"),
        ("tiny", ["model.num_time_buckets=8"], "model.num_time_buckets: got 8.*no effect.*time_encoding=buckets too"),
        (
            "tiny",
            ["model.time_encoding=buckets", "model.time_fraction=0.25"],
            "model.time_fraction: got 0.25.*no effect",
        ),
        ("small", ["model.events.liked.window=7"], "model.events.liked.window: got 7.*events.liked.attention=window"),
        ("tiny", ["kernels.linears_hadamard=true"], "kernels.linears_hadamard: got True.*no effect.*linears is 'bf16'"),
        ("tiny", ["kernels.linears_stochastic=true"], "kernels.linears_stochastic: got True.*no effect"),
        ("tiny", ["kernels.compile_scope=layers"], "kernels.compile_scope: got 'layers'.*set train.compile=true too"),
        (
            "tiny",
            ["model.time_encoding=buckets", "kernels.rope_tables=float16"],
            "kernels.rope_tables: got 'float16'.*'buckets', which rotates nothing",
        ),
        (
            "tiny",
            ["kernels.fused_qk=false", "kernels.fused_qk_backward=true"],
            "kernels.fused_qk_backward: got True.*set kernels.fused_qk=true",
        ),
        ("tiny", ["model.pooling=gdpa", "kernels.fused_qk_backward=true"], "kernels.fused_qk_backward: got True"),
    ],
)
def test_settings_without_effect_are_refused(preset: str, settings: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(preset, sets=settings)


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("tiny", ["data.num_samples=64", "data.num_ids=7", "data.seed=1"]),
        ("small", ["data.seed=1", "data.shuffle_window=64"]),
        ("small", ["data.source=synthetic", "data.num_samples=64"]),
        ("tiny", ["data.source=parquet", "data.path=x", "data.id_policy=hash"]),
        ("tiny", ["model.attention=window", "model.window=7"]),
        ("small", ["model.events.liked.attention=window", "model.window=7", "model.events.liked.window=9"]),
        ("tiny", ["model.time_encoding=buckets", "model.num_time_buckets=8"]),
        ("tiny", ["kernels.linears=fp8_block128", "kernels.linears_hadamard=true", "kernels.linears_stochastic=true"]),
        ("tiny", ["train.compile=true", "kernels.compile_scope=layers"]),
        ("tiny", ["kernels.rope_tables=float16", "kernels.fused_qk_backward=true"]),
        ("tiny", ["model.pooling=gdpa", "model.attention=full", "kernels.fused_qk_backward=true"]),
    ],
)
def test_the_same_settings_pass_where_they_have_an_effect(preset: str, settings: list[str]):
    load_config(preset, sets=settings)


@pytest.mark.parametrize("preset", RUN_PRESETS)
def test_a_stored_configuration_is_an_overlay(preset: str, tmp_path):
    """It names every key, those without effect too, with the values that they have anyway."""
    file = tmp_path / "config.toml"
    file.write_text(get_preset(preset).to_toml())
    assert load_config(toml=file) == get_preset(preset)


def test_too_many_event_types_are_refused():
    events = {name: EventConfig() for name in "abc"}
    with pytest.raises(ConfigError, match=r"model.events: got \['a', 'b', 'c'\], expected at most"):
        get_preset("tiny").with_model(events=events)


def test_activations_are_those_of_the_library():
    from gemworks.gem.config import Activation
    from gemworks.jagged.ops.gdpa import activations

    assert get_args(Activation) == get_args(activations.Activation)


def test_configs_are_frozen_and_checked_again_on_replace():
    config = get_preset("tiny")
    for part in (config, config.model, config.data, config.optimizer, config.train, EventConfig()):
        name = fields(part)[0].name
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, getattr(part, name))
    with pytest.raises(ConfigError, match=r"train\.epochs"):
        replace(config.train, epochs=0)
    with pytest.raises(ConfigError, match=r"data\.batch_size"):
        config.with_data(batch_size=0)
    assert config.with_data(batch_size=3).data.batch_size == 3
    assert config.data.batch_size == 64


def test_reading_a_configuration_does_not_import_torch():
    code = "import sys, gemworks.gem.presets as p; p.load_config('small'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["kernels.compile_saves=least"],
            "kernels.compile_saves: got 'least', expected 'usual', as train.compile is false.*train.compile=true",
        ),
        (
            ["kernels.activations=recompute@0.5", "kernels.compile_scope=layers"],
            "kernels.activations: got 'recompute@0.5', expected .*, as train.compile is false.*train.compile=true",
        ),
        (
            ["train.graph_memory=shared"],
            "train.graph_memory: got 'shared', expected 'own', as train.cuda_graphs is false.*cuda_graphs=true",
        ),
        (
            ["optimizer.state_place=host", "train.cuda_graphs=true"],
            "optimizer.state_place: got 'host', expected 'device', as train.cuda_graphs is true: .*; or set "
            "train.cuda_graphs=false",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("tiny", sets=sets)


def test_what_has_an_effect_is_taken() -> None:
    load_config("tiny", sets=["kernels.compile_saves=least", "train.compile=true"])
    load_config("tiny", sets=["train.graph_memory=shared", "train.cuda_graphs=true"])
    load_config("tiny", sets=["optimizer.state_place=host"])
