"""Two processes as one run: the same steps as one process, and what happens when one of them fails.

A module fixture trains once with one process and once with two; the rest reads what they left behind. The last step of
an epoch has one sample, so that one of two ranks has none (case M2).
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gem_ranks import Faults, Outcome, assert_close_runs, run_ranks, trained
from gemworks.gem import checkpoint_files as files
from gemworks.gem.data import open_source
from gemworks.gem.evaluate import evaluate_run
from gemworks.gem.presets import load_config
from gemworks.gem.run_dir import RunDir
from gemworks.gem.trainer import Trainer

pytestmark = pytest.mark.dist

NUM_SAMPLES = 49
SETTINGS = (
    f"data.num_samples={NUM_SAMPLES}",
    "data.batch_size=8",
    "data.max_length=8",
    "data.prefetch=2",
    "data.shuffle_window=32",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_experts=1",
    "optimizer.warmup_steps=3",
    "train.epochs=2",
    "train.log_every=1",
    "train.save_every=3",
    "train.eval_every=7",
    "train.device=cpu",
    "train.rank_timeout_seconds=60",
)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Outcome]]:
    """A run of one process, the same of two, and what the two did."""
    folder = tmp_path_factory.mktemp("ranks")
    (alone,) = run_ranks(trained, 1, str(folder / "one"), SETTINGS)
    assert alone.error is None, alone.error
    outcomes = run_ranks(trained, 2, str(folder / "two"), SETTINGS)
    assert [outcome.error for outcome in outcomes] == [None, None]
    return folder / "one", folder / "two", outcomes


def test_two_processes_equal_one(together: tuple[Path, Path, list[Outcome]]) -> None:
    one, two, _ = together
    assert_close_runs(one, two)
    summary = RunDir.open(two).summary()
    assert summary is not None
    assert summary["num_ranks"] == 2
    first, second = ((two / name).read_text() for name in ("train.log", "rank_1.log"))
    for text in ("ranks: 2; each takes its part", " 14/14  loss", "valid at step 14: NE"):
        assert text in first
        assert text in second


def test_m2_uneven_ends_lose_no_sample_and_repeat_none(together: tuple[Path, Path, list[Outcome]]) -> None:
    """A rank without samples takes part in the step (case M2)."""
    _, two, outcomes = together
    traces = [outcome.value for outcome in outcomes]
    config = RunDir.open(two).config()
    whole = Trainer(config, open_source(config.data), torch.device("cpu"))
    expected = [batch.sample_ids_B.tolist() for _ in range(2) for batch in whole.loader]
    assert [len(trace) for trace in traces] == [len(expected)] * 2
    shares = [[ids for _, ids, _ in trace] for trace in traces]
    for step, ids in enumerate(expected):
        assert shares[0][step] + shares[1][step] == ids
    assert min(len(share[6]) for share in shares) == 0
    assert [step[2] for step in traces[0]] == [step[2] for step in traces[1]]  # one loss, to the bit


def test_rows_say_how_long_collectives_took(together: tuple[Path, Path, list[Outcome]]) -> None:
    one, two, _ = together
    assert all(row["communication_ms"] is None for row in RunDir.open(one).rows("train"))
    rows = RunDir.open(two).rows("train")
    assert rows[0]["communication_ms"] is None  # the first step is not watched, the second is
    assert rows[1]["communication_ms"] > 0
    assert rows[1]["communication_ms"] <= rows[1]["step_ms"]
    assert rows[1]["exposed_communication_ms"] is None
    assert "; communication " in (two / "train.log").read_text()
    assert "; communication " in (two / "rank_1.log").read_text()


def test_l5_a_checkpoint_of_two_evaluates_to_the_same_bits_on_one(together: tuple[Path, Path, list[Outcome]]) -> None:
    _, two, _ = together
    assert evaluate_run(two)["equals_training"] is True
    assert evaluate_run(two, split="valid", which="last")["equals_training"] is True


def test_sigterm_to_one_rank_stops_both_and_one_process_goes_on(
    together: tuple[Path, Path, list[Outcome]], tmp_path: Path
) -> None:
    """All ranks decide to stop in the same step; one process goes on with a checkpoint of two, amid an epoch."""
    path = tmp_path / "run"
    outcomes = run_ranks(trained, 2, str(path), SETTINGS, Faults(rank=1, step=10, kind="terminate"))
    assert [outcome.error and outcome.error[0] for outcome in outcomes] == ["Preempted", "Preempted"]
    assert files.steps(path / "checkpoints")[-1] == 10
    (rest,) = run_ranks(trained, 1, str(path), SETTINGS)
    assert rest.error is None
    assert [step for step, _, _ in rest.value] == list(range(11, 15))
    assert_close_runs(together[0], path)


def test_a_killed_rank_stops_the_other_which_names_it(tmp_path: Path) -> None:
    outcomes = run_ranks(trained, 2, str(tmp_path / "run"), SETTINGS, Faults(rank=1, step=8, kind="kill"))
    assert outcomes[1].code == -9
    assert outcomes[0].error is not None
    kind, text = outcomes[0].error
    assert kind == "RankFailure"
    assert text.startswith("rank 1 stopped without a word: killed, hanging, or on a machine that is lost")
    assert "RankFailure: rank 1 stopped" in (tmp_path / "run" / "train.log").read_text()
    assert 6 in files.steps(tmp_path / "run" / "checkpoints")  # that of step 7 was being written, perhaps


def test_a_failure_of_the_first_rank_alone_stops_the_other_with_its_reason(tmp_path: Path) -> None:
    """Only the first rank seals checkpoints: a full disk there is its failure alone."""
    path = tmp_path / "run"
    outcomes = run_ranks(trained, 2, str(path), SETTINGS, Faults(rank=0, seal_fails_at=6))
    errors = [outcome.error for outcome in outcomes]
    assert errors[0] is not None
    assert errors[1] is not None
    assert errors[0][0] == "CheckpointError"
    assert "No space left on device" in errors[0][1]
    assert errors[1][0] == "RankFailure"
    assert errors[1][1].startswith("rank 0 failed: CheckpointError: the checkpoint of step 6 could not be written")
    assert "rank 0 failed: CheckpointError" in (path / "rank_1.log").read_text()
    assert files.steps(path / "checkpoints") == [3]


def test_a_folder_in_use_is_refused_by_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "run"
    held = RunDir.claim(path, load_config("tiny", sets=SETTINGS))
    try:
        outcomes = run_ranks(trained, 2, str(path), SETTINGS)
    finally:
        held.close()
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.error[0] == "ValueError"
        assert f"got one that process {os.getpid()} on" in outcome.error[1]


def _unequal(rank: int, world: int) -> None:
    """Builds a trainer whose second rank starts with another weight."""
    from gemworks.gem import trainer as module
    from gemworks.gem.world import open_world

    build = module.Gem

    def other(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        if rank == 1:
            with torch.no_grad():
                model.head.mlp.up.weight[0, 0] += 1e-6
        return model

    module.Gem = other  # type: ignore[misc, assignment]
    config = load_config("tiny", sets=SETTINGS)
    with open_world(60, cuda=False) as ranks:
        Trainer(config, open_source(config.data), torch.device("cpu"), ranks)


def test_m4_parameters_that_start_different_are_named_on_every_rank() -> None:
    for outcome in run_ranks(_unequal, 2):
        assert outcome.error is not None
        assert outcome.error[0] == "RuntimeError"
        assert "replicas start different: ['head.mlp.up.weight'] of" in outcome.error[1]


def _poisoned(rank: int, world: int) -> dict[str, Any]:
    """Steps of which all but the first have a NaN loss on the second rank. Says what the tables did."""
    from gemworks.gem.numerics import NonFiniteError
    from gemworks.gem.world import open_world

    config = load_config("tiny", sets=[*SETTINGS, "train.max_skipped=1"])
    with open_world(60, cuda=False) as ranks:
        trainer = Trainer(config, open_source(config.data), torch.device("cpu"), ranks)
        forward = trainer._forward

        def bad(batch: Any) -> Any:
            logits, loss = forward(batch)
            return logits, loss * float("nan") if rank == 1 and trainer.step > 0 else loss

        trainer._forward = bad  # type: ignore[method-assign]

        def tables() -> list[torch.Tensor]:
            shards = [p.detach().clone() for p in trainer.model.sparse_parameters()]
            return shards + [t.pieces[0][1].clone() for t in trainer.optimizers.tables.accumulators().values()]  # type: ignore[attr-defined]

        states, message = [tables()], ""
        try:
            states.extend(tables() for _ in trainer.steps())
        except NonFiniteError as error:
            message = str(error)
        moved = [any(not torch.equal(x, y) for x, y in zip(a, b, strict=True)) for a, b in pairwise(states)]
        return {"moved": moved, "skipped": trainer.num_skipped, "message": message, "calls": ranks.on_first(lambda: 1)}


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all() -> None:
    outcomes = run_ranks(_poisoned, 2)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for outcome in outcomes:
        assert outcome.value["moved"] == [True, False]
        assert outcome.value["skipped"] == 2
        assert "step 3 is not finite, and 1 steps of this run have been skipped already" in outcome.value["message"]
        assert "It begins at: loss on rank 1" in outcome.value["message"]


def _talk(rank: int, world: int) -> dict[str, Any]:
    """What the first rank does alone may take longer than the time-out; its failure is everybody's."""
    import time

    from gemworks.gem.world import open_world

    failed = ""
    with open_world(5, cuda=False) as ranks:
        waited = ranks.on_first(lambda: time.sleep(7) or "done")
        try:
            ranks.on_first(lambda: [][0])
        except IndexError as error:
            failed = str(error)
        gathered = ranks.gather_to_first(rank)
        return {
            "waited": waited,
            "failed": failed,
            "any": ranks.any(rank == 1),
            "all": ranks.gather(rank),
            "first": gathered,
        }


def test_others_wait_for_the_first_rank_as_long_as_it_lives() -> None:
    outcomes = run_ranks(_talk, 2)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for rank, outcome in enumerate(outcomes):
        first = [0, 1] if rank == 0 else [1]
        expected = {"waited": "done", "failed": "list index out of range", "any": True, "all": [0, 1], "first": first}
        assert outcome.value == expected


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    from gemworks.gem.data import open_loader

    config = load_config("tiny", sets=["data.batch_size=9", "data.num_samples=64"])
    with pytest.raises(ValueError, match=r"data.batch_size: got 9, expected a multiple of the number of ranks, 2"):
        open_loader(open_source(config.data), config.data, "train", rank=0, world_size=2)
