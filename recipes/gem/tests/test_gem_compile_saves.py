"""What a compiled layer keeps for backward: with `kernels.compile_saves=least` no float32 copy of the bf16 stream."""

import operator

import pytest
import torch
from gemworks.gem import implement as implement_module
from gemworks.gem.config import GemConfig
from gemworks.gem.data import open_source
from gemworks.gem.implement import implement
from gemworks.gem.ladder.settings import SETTINGS
from gemworks.gem.ladder.step import read_batches
from gemworks.gem.model import Gem
from gemworks.gem.presets import load_config
from gemworks.gem.schema import Batch
from torch import Tensor
from torch._functorch import config as functorch_config

pytestmark = [
    pytest.mark.reference,
    # torch's own compiler looks at `grad` of tensors that are no leaves, and imports what it calls deprecated
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
]


def losses(
    config: GemConfig, batch: Batch, *, reset: bool = True
) -> tuple[Tensor, list[Tensor | None], dict[torch.dtype, int]]:
    """Loss, gradients, and rows of the stream's width that layers keep, by dtype."""
    if reset:
        torch._dynamo.reset()
    torch.manual_seed(0)
    model = Gem(open_source(config.data).schema, config)
    implement(model, config)
    kept: dict[torch.dtype, int] = {}
    rows = {e.timestamps_T.shape[0] for e in batch.events.values()}

    def pack(x: Tensor) -> Tensor:
        if x.dim() == 2 and x.shape[0] in rows and x.shape[1] == config.model.dim:
            kept[x.dtype] = kept.get(x.dtype, 0) + 1
        return x

    embeddings, event_rows = model.embeddings(batch)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.from_embeddings(embeddings, event_rows, batch)
    loss = out.float().square().mean()
    return loss.detach(), list(torch.autograd.grad(loss, list(model.dense_parameters()), allow_unused=True)), kept


def one_layer() -> tuple[GemConfig, Batch]:
    one = ("data.num_event_types=1", "model.num_event_types=1", "model.attention=full", "model.num_layers=1")
    config = SETTINGS["fast_gelu"](load_config("tiny", sets=["data.batch_size=8", *one]))
    (batch,) = read_batches(config, open_source(config.data), 1, pin=False)
    return config, batch


def test_least_keeps_no_float32_copy_of_the_stream(monkeypatch: pytest.MonkeyPatch):
    """The same loss and gradients, and fewer bytes: the partitioner of the real compiler, without its slow back end."""
    monkeypatch.setattr(implement_module, "INNER", "aot_eager_decomp_partition")
    config, batch = one_layer()
    loss, grads, usual = losses(config, batch)
    least_loss, least_grads, least = losses(config.with_kernels(compile_saves="least"), batch)
    assert usual.get(torch.float32, 0) > least.get(torch.float32, 0)
    assert usual[torch.bfloat16] >= least[torch.bfloat16]
    torch.testing.assert_close(least_loss, loss, rtol=1e-3, atol=1e-5)
    for found, wanted in zip(least_grads, grads, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()) + 1e-9)


def test_a_late_residual_is_added_inside_the_next_layer(monkeypatch: pytest.MonkeyPatch):
    """The first layer's graph returns two tensors of the stream, the second one's begins with their sum."""
    sums: list[int] = []

    def looking(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        given = {node for node in graph.graph.nodes if node.op == "placeholder"}
        added = [node for node in graph.graph.nodes if node.op == "call_function" and node.target is operator.add]
        sums.append(sum(set(node.args) <= given for node in added))
        return graph.forward

    monkeypatch.setattr(implement_module, "INNER", looking)
    config, batch = one_layer()
    config = config.with_model(num_layers=2).with_kernels(compile_scope="layers")
    loss, grads, _ = losses(config, batch)
    assert sum(sums) == 0
    late_loss, late_grads, _ = losses(config.with_kernels(late_residual=True), batch)
    assert sum(sums) == 1
    # a late residual is added to a product that was rounded; an early one by the product itself
    torch.testing.assert_close(late_loss, loss, rtol=1e-2, atol=0)
    for found, wanted in zip(late_grads, grads, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()) + 1e-9)


def test_each_setting_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """In one process, as rows of a ladder are measured: the compiler's cache gives no row the graphs of another."""
    monkeypatch.setattr(implement_module, "INNER", "aot_eager_decomp_partition")
    config, batch = one_layer()
    _, _, usual = losses(config, batch)
    _, _, least = losses(config.with_kernels(compile_saves="least"), batch, reset=False)
    _, _, again = losses(config, batch, reset=False)
    assert usual[torch.float32] > least.get(torch.float32, 0)
    assert again == usual


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute@0.5"])
def test_an_activation_policy_compiles_by_the_same_setting(activations: str, monkeypatch: pytest.MonkeyPatch):
    """Layers whose forward gemworks.netmem compiles are cut with the setting too."""
    seen: list[bool] = []

    def looking(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        seen.append(functorch_config.ban_recompute_long_fusible_chains)
        return graph.forward

    monkeypatch.setattr(implement_module, "INNER", looking)
    config, batch = one_layer()
    config = config.with_kernels(activations=activations, compile_scope="layers")
    for saves in ("usual", "least"):
        seen.clear()
        losses(config.with_kernels(compile_saves=saves), batch)
        assert set(seen) == {saves == "usual"}


def test_a_second_call_compiles_nothing(monkeypatch: pytest.MonkeyPatch):
    """The partitioner's setting is no part of what a compiled graph is looked up by."""
    graphs: list[object] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(implement_module, "INNER", counting)
    base = load_config("tiny", sets=["data.batch_size=8", "model.attention=full", "model.num_layers=1"])
    config = SETTINGS["fast_gelu"](base).with_kernels(compile_saves="least")
    (batch,) = read_batches(config, open_source(config.data), 1, pin=False)
    torch._dynamo.reset()
    model = Gem(open_source(config.data).schema, config)
    implement(model, config)
    embeddings, rows = model.embeddings(batch)
    first = model.from_embeddings(embeddings, rows, batch)
    number = len(graphs)
    assert number > 0
    assert torch.equal(model.from_embeddings(embeddings, rows, batch), first)
    assert len(graphs) == number
