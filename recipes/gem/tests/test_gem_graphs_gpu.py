"""CUDA graphs of the dense part on a GPU: a replay equals the same step without a graph, whatever the lengths."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("torchrec")

from gemworks.gem.config import GemConfig
from gemworks.gem.data import open_source
from gemworks.gem.ladder.step import ReadyBatches, TrainingRow, read_batches
from gemworks.gem.layers.__main__ import prepare
from gemworks.gem.presets import load_config
from gemworks.gem.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    # dynamo itself looks at .grad of its non-leaf inputs
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
GPU = torch.device("cuda")
STEPS = 8


def config_of(*sets: str) -> GemConfig:
    return load_config(
        "tiny",
        sets=[
            "model.dim=256", "model.num_heads=2", "model.num_event_types=1", "data.num_event_types=1",
            "data.max_length=256", "data.batch_size=32", "train.dtype=bfloat16", f"train.max_steps={STEPS}", *sets,
        ],
    )  # fmt: skip


def losses_of(config: GemConfig) -> tuple[list[float], Trainer]:
    source = open_source(config.data)
    trainer = Trainer(config, source, GPU)
    trainer.loader = ReadyBatches(read_batches(config, source, STEPS, pin=True))  # pyright: ignore[reportAttributeAccessIssue]
    return [trainer.take_row().loss for _ in trainer.steps()], trainer


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of these tests fall into two buckets, so most steps replay what another batch was captured with."""
    monkeypatch.setattr("gemworks.gem.graphs.BUCKETS", 8)


@pytest.mark.parametrize(("compiled", "memory"), [(False, "own"), (True, "own"), (False, "shared")])
@pytest.mark.parametrize("attention", ["block", "full"])
def test_training_by_graphs_takes_the_same_path(attention: str, compiled: bool, memory: str):
    """More batches than graphs: each graph is replayed with lengths that it was not captured with."""
    sets = [f"model.attention={attention}", f"train.compile={str(compiled).lower()}", "kernels.compile_scope=layers"]
    wanted, _ = losses_of(config_of(*sets))
    found, trainer = losses_of(config_of(*sets, "train.cuda_graphs=true", f"train.graph_memory={memory}"))
    assert trainer._graphs is not None
    assert trainer._graphs.num_graphs == 2
    # float32 sums of bf16 products in another order: a batch has padding now
    assert found == pytest.approx(wanted, rel=2e-3)
    assert found[0] == pytest.approx(wanted[0], rel=2e-4)


@pytest.mark.parametrize("memory", ["own", "shared"])
def test_a_replay_is_the_run_it_was_captured_from(memory: str):
    """On inputs that came after the capture; to the rounding of products, whose kernels may be others in a capture."""
    config = config_of("train.cuda_graphs=true", f"train.graph_memory={memory}")
    source = open_source(config.data)
    trainer = Trainer(config, source, GPU)
    graphs = trainer._graphs
    assert graphs is not None
    batches = [batch.to(GPU) for batch in read_batches(config, source, STEPS, pin=True)]
    for batch in batches:
        _, loss, backward = graphs(batch, 1.0)
        backward()
        replayed = [None if p.grad is None else p.grad.clone() for p in graphs.parameters]
        again = graphs._run(graphs._bucket(batch).inputs)
        torch.testing.assert_close(loss, again.loss, rtol=1e-4, atol=1e-5)
        for found, wanted in zip(replayed, again.parameter_grads, strict=True):
            assert (found is None) == (wanted is None)
            if found is not None and wanted is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()) + 1e-9)
        for p in graphs.parameters:
            p.grad = None


def test_one_graph_more_takes_no_memory_where_they_share_it():
    """Of graphs that share, the pool and the inputs are those of the largest; own ones keep gradients for each."""
    taken, num_dense = {}, 0
    for memory in ("own", "shared"):
        config = config_of("train.cuda_graphs=true", f"train.graph_memory={memory}")
        source = open_source(config.data)
        trainer = Trainer(config, source, GPU)
        graphs = trainer._graphs
        assert graphs is not None
        batches = [batch.to(GPU) for batch in read_batches(config, source, STEPS, pin=True)]
        graphs.prepare(max(batches, key=lambda b: sum(e.timestamps_T.shape[0] for e in b.events.values())))
        before = torch.cuda.memory_allocated()
        for batch in batches:
            graphs.prepare(batch)
        assert graphs.num_graphs > 1
        num_dense = sum(p.numel() for p in graphs.parameters)
        taken[memory] = (torch.cuda.memory_allocated() - before) / (graphs.num_graphs - 1)
    assert 4 * num_dense < taken["own"] < 40 * num_dense  # bytes; a stream more of cuBLAS would have 64 MiB
    assert taken["shared"] < num_dense


def test_a_step_by_graphs_does_not_wait_for_the_device():
    """Nothing between a batch on the device and its gradients synchronises, once the bucket has its graph."""
    config = config_of("train.cuda_graphs=true")
    source = open_source(config.data)
    trainer = Trainer(config, source, GPU)
    graphs = trainer._graphs
    assert graphs is not None
    (batch,) = (batch.to(GPU) for batch in read_batches(config, source, 1, pin=True))
    graphs(batch, 1.0)[2]()
    torch.cuda.synchronize()
    embeddings = trainer.model.embeddings(batch)
    trainer.model.embeddings.forward = lambda batch: embeddings  # torchrec's own lookups are not ours to promise
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, loss, _ = graphs(batch, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()


def test_a_step_that_is_not_finite_changes_nothing_on_the_device():
    config = config_of("train.cuda_graphs=true")
    source = open_source(config.data)
    batches = read_batches(config, source, STEPS, pin=False)
    batches[2].dense_BC[1, 0] = float("nan")
    trainer = Trainer(config, source, GPU)
    trainer.loader = ReadyBatches(batches)  # pyright: ignore[reportAttributeAccessIssue]
    assert trainer.optimizers.skips_on_device
    weights = []
    for step in trainer.steps():
        assert (trainer._launched is None) == (step == STEPS)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert [(note.kind, note.step) for note in trainer.take_notes()] == [("skipped", 3)]
    assert trainer.num_skipped == 1


def test_a_ladder_row_with_graphs_has_its_figures():
    config = config_of("train.cuda_graphs=true")
    source = open_source(config.data)
    row = TrainingRow(config, source, read_batches(config, source, STEPS, pin=True), GPU, warmup=2)
    cost = row.measure(trace=True)
    assert cost.peak_gib is not None
    assert cost.peak_gib > 0.01
    assert cost.split is not None
    assert cost.split.tensor_core_ms > 0


# Layer types share inputs and parameters: what one was captured with is kept, and the next runs on another stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_layers_alone_are_replayed_too():
    config = config_of("train.cuda_graphs=true", "model.attention=full")
    for layer in prepare(config, GPU):
        if layer.run is not None:
            torch.empty(1 << 28, device=GPU).fill_(float("nan"))  # over what is free
            out, *grads = layer.run()  # pyright: ignore[reportGeneralTypeIssues]
            assert out.isfinite().all(), layer.part.name
            assert all(x is None or x.isfinite().all() for x in grads), layer.part.name
