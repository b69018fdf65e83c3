"""`kernels.compile_scope=all`: what passes over all events before and after the layers is compiled too."""

from __future__ import annotations

import pytest
import torch
from gemworks.gem import implement as implement_module
from gemworks.gem.config import GemConfig
from gemworks.gem.data import open_source
from gemworks.gem.implement import implement
from gemworks.gem.ladder.settings import SETTINGS, build
from gemworks.gem.ladder.step import read_batches, run_steps
from gemworks.gem.model.gem import Gem
from gemworks.gem.presets import load_config
from gemworks.gem.schema import Batch
from torch import Tensor

pytestmark = [
    pytest.mark.reference,
    # torch's own compiler looks at `grad` of tensors that are no leaves, and imports what it calls deprecated
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
]

CPU = torch.device("cpu")


def base(*sets: str) -> GemConfig:
    # full attention: on a CPU the compiler cannot follow the reference of block attention
    return load_config("tiny", sets=["data.batch_size=8", "model.num_layers=1", "model.attention=full", *sets])


def compiled(config: GemConfig) -> Gem:
    torch.manual_seed(0)
    model = Gem(open_source(config.data).schema, config)
    implement(model, config)
    return model


def trained(model: Gem, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
    """Logits, and gradients of the dense parameters."""
    embeddings, rows = model.embeddings(batch)
    logits = model.from_embeddings(embeddings, rows, batch)
    weights = torch.arange(1.0, logits.numel() + 1).view_as(logits)
    return logits, list(torch.autograd.grad((logits * weights).sum(), [*model.dense_parameters()], allow_unused=True))


@pytest.mark.parametrize("sets", [(), ("model.time_encoding=buckets", "model.pooling=gdpa")])
@pytest.mark.parametrize("row", ["fast_gelu", "graphs_late_residual"])
def test_the_same_function_and_gradients(row: str, sets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implement_module, "INNER", "aot_eager_decomp_partition")
    torch._dynamo.reset()
    config = SETTINGS[row](base(*sets))
    config = config.with_kernels(rope_tables="float32")  # so that rounding of tables hides nothing
    (batch,) = read_batches(config, open_source(config.data), 1, pin=False)
    logits, grads = trained(compiled(config), batch)
    all_logits, all_grads = trained(compiled(config.with_kernels(compile_scope="all")), batch)
    torch.testing.assert_close(all_logits, logits, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(all_grads, grads, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()) + 1e-9)


def test_tables_and_head_are_graphs_that_serve_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is one graph from the stream to the logits; the tables of each event type are one; nothing is compiled
    again for other totals of events and another number of samples."""
    names: list[set[str]] = []

    def looking(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        called = {str(node.target) for node in graph.graph.nodes if node.op in ("call_function", "call_method")}
        names.append({name for name in ("cos", "sin", "_mean_pool", "gelu") if any(name in text for text in called)})
        return graph.forward

    monkeypatch.setattr(implement_module, "INNER", looking)
    torch._dynamo.reset()
    config = SETTINGS["fast_gelu"](base())
    batches = read_batches(config, open_source(config.data), 2, pin=False)
    trained(compiled(config), batches[0])
    assert not any("cos" in found or "_mean_pool" in found for found in names)
    names.clear()
    torch._dynamo.reset()
    model = compiled(config.with_kernels(compile_scope="all"))
    trained(model, batches[0])
    assert {"cos", "sin"} in names
    assert sum("_mean_pool" in found and "gelu" in found for found in names) == 1
    number = len(names)
    trained(model, batches[1])
    other = config.with_data(batch_size=6)
    trained(model, read_batches(other, open_source(other.data), 1, pin=False)[0])
    assert len(names) == number


def test_the_row_learns_what_its_base_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real steps, of batches padded as for graphs."""
    monkeypatch.setattr(implement_module, "INNER", "aot_eager")
    torch._dynamo.reset()
    configs = build(base("train.dtype=float32"))
    source = open_source(configs["graphs_fewer_passes"].data)
    batches = read_batches(configs["graphs_fewer_passes"], source, 3, pin=False)
    losses = [run_steps(configs[row], source, batches, CPU, warmup=1).loss for row in
              ("graphs_fewer_passes", "graphs_compiled_ends")]  # fmt: skip
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
