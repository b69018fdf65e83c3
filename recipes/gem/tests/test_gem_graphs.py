"""The dense part by graphs: padding to buckets changes neither loss nor gradients, and a graph replays what ran."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from gemworks.gem.config import EventConfig, GemConfig
from gemworks.gem.data import open_source
from gemworks.gem.graphs import GraphedStep, _Place, bucket_rows, bytes_per_graph, num_padding_samples
from gemworks.gem.ladder.step import ReadyBatches, read_batches
from gemworks.gem.model import Gem
from gemworks.gem.presets import get_preset, load_config
from gemworks.gem.random_batch import random_batch
from gemworks.gem.schema import Batch, EventType, IdFeature, Schema
from gemworks.gem.trainer import Trainer
from gemworks.gem.typed_config import ConfigError
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

pytestmark = pytest.mark.reference
CPU = torch.device("cpu")
ITEM = IdFeature(name="item", num_ids=40, table="item")
SCHEMA = Schema(
    ids=(IdFeature(name="user", num_ids=50, table="user"), ITEM),
    dense_names=("age", "rate"),
    events=(EventType(name="click", ids=(ITEM,), float_names=("price",)), EventType(name="view", ids=(ITEM,))),
    tasks=("click",),
)
VARIANTS: dict[str, dict] = {
    "block": {},
    "full": {"attention": "full"},
    "buckets": {"time_encoding": "buckets", "pooling": "gdpa"},
    "events": {"events": {"view": EventConfig(dim=128, num_heads=2, attention="full")}},
}
# totals that fill a bucket, nearly fill it, and a batch without events
LENGTHS: dict[str, dict[str, Sequence[int]]] = {
    "full bucket": {"click": [32] * 8, "view": [0, 64, 0, 64, 1, 63, 32, 32]},
    "ragged": {"click": [0, 1, 50, 33, 64, 12, 5, 0], "view": [3, 65 - 3, 0, 11, 1, 0, 31, 0]},
    "no events": {"click": [0] * 8, "view": [0] * 8},
}


def loss_of(logits_BK: Tensor, labels_BK: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(logits_BK, labels_BK)


def small(variant: str) -> GemConfig:
    config = get_preset("tiny").with_model(**VARIANTS[variant]).with_data(batch_size=8, max_length=64)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, cuda_graphs=True))


def plain(config: GemConfig, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Gem(SCHEMA, config)
    logits_BK = model(batch)
    loss = loss_of(logits_BK, batch.labels_BK) * 0.5
    loss.backward()
    return logits_BK.detach(), loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def graphed(config: GemConfig, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Gem(SCHEMA, config)
    step = GraphedStep(model, config, loss_of, CPU)
    assert step.takes(batch)
    logits_BK, loss, backward = step(batch, 0.5)
    backward()
    assert all(p.grad is None or p.grad.stride() == p.stride() for p in step.parameters)
    return logits_BK, loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_to_a_bucket_changes_nothing(variant: str, lengths: str):
    config, batch = small(variant), random_batch(SCHEMA, LENGTHS[lengths])
    logits_BK, loss, gradients = plain(config, batch)
    own_logits_BK, own_loss, own = graphed(config, batch)
    torch.testing.assert_close(own_logits_BK, logits_BK, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-6)
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        bound = 1e-5 * float(gradient.abs().max()) + 1e-9
        torch.testing.assert_close(own[name], gradient, rtol=1e-4, atol=bound, msg=name)


@pytest.mark.parametrize("finite", [True, False])
def test_what_a_bucket_held_before_does_not_stay(finite: bool):
    """A long batch, then a short one of the same bucket: the rows of the first must not be seen. If they were not
    finite, what pads the second would carry that into the gradients of all weights, step after step."""
    config = small("block")
    rows = bucket_rows(config)
    long = random_batch(SCHEMA, {"click": [rows // 8] * 8, "view": [rows // 8] * 8}, seed=1)
    short = random_batch(SCHEMA, {"click": [1] * 8, "view": [2] * 8}, seed=2)
    torch.manual_seed(0)
    step = GraphedStep(Gem(SCHEMA, config), config, loss_of, CPU)
    tables = [p.detach().clone() for p in step.model.sparse_parameters()]
    if not finite:
        long.events["click"].floats_TC.fill_(math.nan)
        for table in step.model.sparse_parameters():
            table.data.fill_(math.inf)
    step(long, 1.0)[2]()
    for p in step.model.parameters():
        p.grad = None
    for table, before in zip(step.model.sparse_parameters(), tables, strict=True):
        table.data.copy_(before)
    _, loss, backward = step(short, 0.5)
    backward()
    assert step.num_graphs == 1
    _, wanted_loss, wanted = plain(config, short)
    torch.testing.assert_close(loss, wanted_loss)
    for name, p in step.model.named_parameters():
        if p.grad is not None:
            bound = 1e-5 * float(wanted[name].abs().max()) + 1e-9
            torch.testing.assert_close(p.grad, wanted[name], rtol=1e-4, atol=bound, msg=name)


def test_a_larger_bucket_lets_the_smaller_ones_go():
    config = small("block")
    step = GraphedStep(Gem(SCHEMA, config), config, loss_of, CPU)
    batches = [random_batch(SCHEMA, {"click": [n] * 8, "view": [1] * 8}) for n in (20, 64, 20, 40)]
    counts = []
    for batch in batches:
        step.prepare(batch)
        counts.append(step.num_graphs)
    assert counts == [1, 1, 2, 3]


@pytest.mark.parametrize("variant", ["block", "events"])
def test_buckets_that_share_their_memory_do_not_see_each_other(variant: str):
    """Large and small buckets in turn, all in the rows of the largest: each step is as in a trainer of its own."""
    config = small(variant)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, graph_memory="shared"))
    torch.manual_seed(0)
    step = GraphedStep(Gem(SCHEMA, config), config, loss_of, CPU)
    batches = [
        random_batch(SCHEMA, {"click": [n] * 8, "view": [m] * 8}, seed=n) for n, m in ((64, 64), (20, 64), (20, 1))
    ]
    inputs = []
    for batch in (*batches, batches[0], batches[2]):
        _, loss, backward = step(batch, 0.5)
        backward()
        _, wanted_loss, wanted = plain(config, batch)
        torch.testing.assert_close(loss, wanted_loss)
        for name, p in step.model.named_parameters():
            if p.grad is not None:
                bound = 1e-5 * float(wanted[name].abs().max()) + 1e-9
                torch.testing.assert_close(p.grad, wanted[name], rtol=1e-4, atol=bound, msg=name)
            p.grad = None
        inputs.append({x.untyped_storage().data_ptr() for x in step._bucket(batch).inputs.event_rows.values()})
    assert step.num_graphs == 3
    assert all(places == inputs[0] for places in inputs)


def test_shared_memory_that_is_too_short_is_made_anew():
    """A bucket of fewer rows in all, but of more rows of one type than the memory has."""
    config = small("block")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, graph_memory="shared"))
    step = GraphedStep(Gem(SCHEMA, config), config, loss_of, CPU)
    for click, view, graphs in ((60, 1, 1), (1, 40, 1), (1, 30, 2)):
        step.prepare(random_batch(SCHEMA, {"click": [click] * 8, "view": [view] * 8}))
        assert step.num_graphs == graphs


def test_shared_memory_is_made_for_all_that_came():
    """Two kinds of batches of which neither fits the other's rows: from the second round on every graph stays."""
    config = small("block")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, graph_memory="shared"))
    step = GraphedStep(Gem(SCHEMA, config), config, loss_of, CPU)
    batches = [random_batch(SCHEMA, {"click": [n] * 8, "view": [m] * 8}) for n, m in ((1, 40), (60, 1))]
    for batch in batches:
        step.prepare(batch)
    rounds = []
    for _ in range(3):
        for batch in batches:
            step.prepare(batch)
        rounds.append(list(step._buckets.values()))
    assert step.num_graphs == 2
    assert all(a is b for later in rounds[1:] for a, b in zip(rounds[0], later, strict=True))


def test_a_graph_of_its_own_has_rows_of_its_own():
    config = small("block")
    step = GraphedStep(Gem(SCHEMA, config), config, loss_of, CPU)
    for n, m in ((1, 40), (60, 1)):
        batch = random_batch(SCHEMA, {"click": [n] * 8, "view": [m] * 8})
        step.prepare(batch)
        events = step._bucket(batch).inputs.batch.events
        for event, total in zip(SCHEMA.events, step._key(batch), strict=True):
            stored = events[event.name].timestamps_T
            assert stored.untyped_storage().nbytes() == total * stored.element_size()


def test_no_memory_for_inputs_says_what_to_change(monkeypatch: pytest.MonkeyPatch):
    """Inputs may be what a GPU is too full for, not only the capture."""

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("full")

    config = small("block")
    batch = random_batch(SCHEMA, {"click": [1] * 8, "view": [1] * 8})
    for name in ("_fill", "_Room.make"):
        with monkeypatch.context() as patch:
            patch.setattr(f"gemworks.gem.graphs.{name}", full)
            step = GraphedStep(Gem(SCHEMA, config), config, loss_of, CPU)
            with pytest.raises(torch.OutOfMemoryError, match=r"train\.graph_memory=shared"):
                step.prepare(batch)


def test_a_borrowed_place_is_the_tensors():
    x = torch.arange(24.0).view(4, 6)[:, 1::2]
    place = _Place(x).__cuda_array_interface__
    assert (place["shape"], place["strides"], place["typestr"]) == ((4, 3), (24, 8), "<f4")
    assert place["data"] == (x.data_ptr(), False)


def test_no_room_for_a_graph_says_what_to_change():
    """What one graph keeps, and the three ways out; a run that shares is not told to share."""
    config = small("block")
    step = GraphedStep(Gem(SCHEMA, config), config, loss_of, CPU)
    text = step._no_room((64, 64), torch.OutOfMemoryError("full"))
    assert "train.graph_memory=shared" in text
    assert "data.balance_window=8" in text
    assert text.endswith("full")
    step._shares = True
    text = step._no_room((64, 64), torch.OutOfMemoryError("full"))
    assert "graph_memory" not in text
    assert "others, which share inputs and gradients" in text
    num_dense = sum(p.numel() for p in step.model.dense_parameters())
    assert bytes_per_graph(config, step.model, 128) == 4 * (num_dense + 2 * 128 * 2 * config.model.embedding_dim)


def test_another_number_of_samples_is_not_taken():
    config = small("block")
    step = GraphedStep(Gem(SCHEMA, config), config, loss_of, CPU)
    assert not step.takes(random_batch(SCHEMA, {"click": [1] * 7, "view": [1] * 7}))


def test_too_many_buckets_are_said_once_they_are_reached(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gemworks.gem.graphs.MAX_GRAPHS", 1)
    config = small("block")
    step = GraphedStep(Gem(SCHEMA, config), config, loss_of, CPU)
    one = random_batch(SCHEMA, {"click": [1] * 8, "view": [1] * 8})
    step.prepare(one)
    assert step.takes(one)
    with pytest.warns(UserWarning, match="more than 1 buckets"):
        assert not step.takes(random_batch(SCHEMA, {"click": [64] * 8, "view": [1] * 8}))


@pytest.mark.parametrize("preset", ["tiny", "small", "base", "large"])
def test_padding_always_fits_its_samples(preset: str):
    config = get_preset(preset)
    assert bucket_rows(config) - 1 <= num_padding_samples(config) * config.data.max_length


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_takes_the_same_path(accumulate: int):
    """Whole steps, optimizers and tables included, with a last batch that is smaller."""
    losses = {}
    for graphs in (False, True):
        config = load_config(
            "tiny",
            sets=[
                "data.batch_size=16", "data.num_samples=104", f"train.accumulate={accumulate}",
                f"train.cuda_graphs={str(graphs).lower()}",
            ],
        )  # fmt: skip
        source = open_source(config.data)
        trainer = Trainer(config, source, CPU)
        trainer.loader = ReadyBatches(read_batches(config, source, 7, pin=False))  # pyright: ignore[reportAttributeAccessIssue]
        losses[graphs] = [trainer.take_row().loss for _ in trainer.steps()]
        assert (trainer._graphs is not None and trainer._graphs.num_graphs > 0) == graphs
    assert len(losses[True]) > 2
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    assert losses[True][0] != losses[True][-1]


@pytest.mark.parametrize(
    "sets",
    [["model.dropout=0.1"], ["kernels.linears_stochastic=true"], ["kernels.activations=offload"]],
)
def test_what_a_graph_would_freeze_is_refused(sets: list[str]):
    with pytest.raises(ConfigError, match="which a graph would not draw or move anew"):
        load_config("tiny", sets=["train.cuda_graphs=true", *sets])


def test_a_host_that_looks_one_step_late_sees_the_same(monkeypatch: pytest.MonkeyPatch):
    """The fused optimizer decides on the device whether a step counts: rows, notes and weights are those of a host
    that decides at once, with a step in the middle that is not finite."""
    seen = {}
    for fused in (False, True):
        monkeypatch.setattr("gemworks.gem.optim._takes_fused", lambda parameters, fused=fused: fused)
        config = load_config("tiny", sets=["data.batch_size=16", "train.max_steps=7"])
        source = open_source(config.data)
        trainer = Trainer(config, source, CPU)
        batches = read_batches(config, source, 7, pin=False)
        batches[3].dense_BC[2, 0] = float("nan")
        trainer.loader = ReadyBatches(batches)  # pyright: ignore[reportAttributeAccessIssue]
        assert trainer.optimizers.skips_on_device == fused
        late = []
        for step in trainer.steps():
            late.append(trainer._launched is not None)
            if step in (2, 5):
                trainer.take_row()
        assert late == [fused and step < 7 for step in range(1, 8)]
        notes = [(note.kind, note.step) for note in trainer.take_notes()]
        row = trainer.take_row()
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        seen[fused] = notes, row.loss, row.ne, row.num_skipped, row.grad_norm, weights
    assert seen[True][0] == seen[False][0] == [("skipped", 4)]
    assert seen[True][1:5] == pytest.approx(seen[False][1:5], rel=1e-4)
    torch.testing.assert_close(seen[True][5], seen[False][5], rtol=1e-3, atol=1e-4)
