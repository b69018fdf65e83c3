"""The recipe under every dimension of `config.parallel`: the steps of one process, read back by one process.

An epoch's last step has one sample, so that a rank has none (case M2). Replicas of tables take row-wise Adagrad's steps
apart and average them: that is another algorithm, whose meaning gemworks.parallel's own tests check.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gem_ranks import assert_close_runs, figures, run_ranks, trained
from gemworks.gem import checkpoint
from gemworks.gem.config import ConfigError
from gemworks.gem.data import open_source
from gemworks.gem.presets import load_config
from gemworks.gem.trainer import Trainer

pytestmark = pytest.mark.dist

SETTINGS = (
    "data.num_samples=49",
    "data.batch_size=8",
    "data.max_length=8",
    "data.prefetch=0",
    "data.shuffle_window=32",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_experts=4",
    "optimizer.warmup_steps=3",
    "train.epochs=2",
    "train.log_every=1",
    "train.save_every=7",
    "train.eval_every=14",
    "train.device=cpu",
    "train.rank_timeout_seconds=60",
)
TABLES = ("parallel.tables=fully_sharded",)
FOUR = {
    "2 shards x 2 replicas": ("parallel.shard=2",),
    "2 experts x 2 replicas": ("parallel.experts=2",),
    "2 experts x 2 shards": ("parallel.experts=2", "parallel.expert_shard=2"),
    "small weights whole": ("parallel.shard=2", "parallel.min_shard_numel=1000"),
    "all": (*TABLES, "parallel.shard=2", "parallel.experts=2", "parallel.expert_shard=2"),
    "all in order": (*TABLES, "parallel.shard=2", "parallel.experts=4", "parallel.placement=row_major"),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spread") / "one"
    (alone,) = run_ranks(trained, 1, str(path), SETTINGS)
    assert alone.error is None, alone.error
    return path


def run(path: Path, num_ranks: int, *settings: str) -> list[float]:
    """Losses of the steps."""
    outcomes = run_ranks(trained, num_ranks, str(path), (*SETTINGS, *settings))
    assert [outcome.error for outcome in outcomes] == [None] * num_ranks
    assert [o.value[-1][2] for o in outcomes] == [outcomes[0].value[-1][2]] * num_ranks
    return [loss for _, _, loss in outcomes[0].value]


def test_m3_experts_and_tables_over_two_ranks_equal_one(one: Path, tmp_path: Path) -> None:
    run(tmp_path / "two", 2, "parallel.experts=2", "parallel.min_shard_numel=1000", *TABLES)
    assert_close_runs(one, tmp_path / "two")


def test_replicas_of_tables_start_with_the_loss_of_one_and_stay_close(one: Path, tmp_path: Path) -> None:
    (alone,) = run_ranks(trained, 1, str(tmp_path / "one"), (*SETTINGS, "train.max_steps=6"))
    losses = run(tmp_path / "two", 2, *TABLES, "parallel.table_replica_shard=2", "train.max_steps=6")
    expected = [loss for _, _, loss in alone.value]
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses == pytest.approx(expected, rel=2e-2)
    assert losses != pytest.approx(expected, rel=1e-6)  # it is another algorithm, and says so


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_equal_one(one: Path, tmp_path: Path, name: str) -> None:
    run(tmp_path / "four", 4, *FOUR[name])
    assert_close_runs(one, tmp_path / "four")


@pytest.mark.slow
def test_a_checkpoint_of_spread_experts_goes_on_elsewhere(one: Path, tmp_path: Path) -> None:
    """Half on four ranks with everything spread, the rest on one."""
    path = tmp_path / "run"
    first = run_ranks(trained, 4, str(path), (*SETTINGS, *FOUR["all"], "train.max_steps=7"))
    assert [outcome.error for outcome in first] == [None] * 4
    config = load_config("tiny", sets=SETTINGS)
    trainer = Trainer(config, open_source(config.data), torch.device("cpu"))
    trainer.load(checkpoint.find(path / "checkpoints", "last"))
    losses = [trainer.take_row().loss for _ in trainer.steps()]
    expected = [row["loss"] for row in figures(one) if row["kind"] == "train"][7:]
    assert losses == pytest.approx(expected, rel=2e-4)


@pytest.mark.slow
def test_weights_gathered_in_bfloat16_or_fp8_or_by_copy_engines_train_alike(tmp_path: Path) -> None:
    """FP8 gathers send what the linears would make of the weights anyway."""
    fp8 = ("kernels.linears=fp8_block128", "kernels.linears_min_features=64")
    common = ("train.dtype=bfloat16", "train.max_steps=6", "model.dim=64", "model.expert_dim=256")
    plain = run(tmp_path / "plain", 2, *common)
    for number, settings in enumerate([("parallel.gather=bfloat16",), ("parallel.all_gather=copy_engine",)]):
        assert run(tmp_path / str(number), 2, *common, *settings) == pytest.approx(plain, rel=1e-2)
    quantised = run(tmp_path / "quantised", 2, *common, *fp8)
    assert run(tmp_path / "fp8", 2, *common, *fp8, "parallel.gather=fp8") == pytest.approx(quantised, rel=1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.experts=3"], "parallel.experts: got 3, expected a divisor of model.num_experts = 2"),
        (["parallel.expert_shard=2"], "parallel.expert_shard: got 2 with parallel.experts 1, expected 1"),
        (["parallel.table_group=2"], "set parallel.tables=fully_sharded too"),
        (["parallel.gather=fp8", "train.dtype=bfloat16"], "set kernels.linears=fp8_block128 too"),
        (["parallel.gather=bfloat16"], "set train.dtype=bfloat16 too"),
        (["parallel.experts=2", "kernels.experts=batched"], "kernels.experts: got 'batched', expected 'separate'"),
        (["parallel.keep_gib=-1.0"], "parallel.keep_gib: got -1.0, expected a number of GiB, 0 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_fix(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("tiny", sets=settings)


def test_a_plan_that_does_not_divide_the_ranks_names_those_that_do(tmp_path: Path) -> None:
    outcomes = run_ranks(trained, 2, str(tmp_path / "run"), (*SETTINGS, "parallel.shard=3"))
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.error[0] == "ValueError"
        assert "dense: got shard 3 = 3, expected a divisor of the world size 2" in outcome.error[1]


def test_a_gather_in_fp8_that_no_weight_takes_is_refused(tmp_path: Path) -> None:
    narrow = ("kernels.linears=fp8_block128", "train.dtype=bfloat16", "parallel.gather=fp8")
    for outcome in run_ranks(trained, 2, str(tmp_path / "run"), (*SETTINGS, *narrow)):
        assert outcome.error is not None
        assert outcome.error[0] == "ValueError"
        assert "parallel.gather: got 'fp8', but no weight can be gathered so" in outcome.error[1]
