"""Compiled regions: graphs are shared per budget and never across budgets; quantised saved activations in the graph."""

from __future__ import annotations

import pytest
import torch
from gemworks.netmem import fused
from gemworks.netmem import policy as policy_module
from gemworks.netmem.policy import apply_policy, partitioner_budget, treated_forward
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

# importing the partitioner's decompositions runs torch's own deprecated torch.jit.script_method
pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
COMPILE = {"backend": "aot_eager_decomp_partition"}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.fixture
def model(monkeypatch) -> nn.Sequential:
    monkeypatch.setattr(policy_module, "has_region_budget", lambda: False)
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(32) for _ in range(4)]).bfloat16()


def gradients(model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    x = torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    model(x).float().square().mean().backward()
    assert x.grad is not None
    return torch.cat([g.float().flatten() for g in (x.grad, *[p.grad for p in model.parameters()]) if g is not None])


def saved_bytes(model: nn.Module) -> int:
    """Bytes that the compiled nodes of a graph hold, without parameters."""
    x = torch.randn(8, 64, 32).bfloat16().requires_grad_()
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    nodes, sizes, seen = [model(x).sum().grad_fn], {}, set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Compiled" in node.name():
            for t in node.saved_tensors:  # type: ignore[attr-defined]
                if t is not None and t.untyped_storage()._cdata not in known:
                    sizes[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        nodes += [n for n, _ in node.next_functions]
    return sum(sizes.values())


def everywhere(model: nn.Module, choice: str) -> dict[str, str]:
    return {name: choice for name, _ in model.named_children()}


def test_one_compilation_per_budget_and_none_borrowed(model, monkeypatch):
    compiled = []
    original = policy_module._inner_compiler

    def counting(inner, options, quantise=False):
        compiler = original(inner, options, quantise)

        def compile_one(*args):
            compiled.append(functorch_config.activation_memory_budget)  # type: ignore[attr-defined]
            return compiler(*args)

        return compile_one

    monkeypatch.setattr(policy_module, "_inner_compiler", counting)
    policy_module._backend.cache_clear()
    expected, held = None, []
    for choice in ("keep", "recompute@0.5", "recompute", "keep"):
        with apply_policy(model, everywhere(model, choice), compile_kwargs=COMPILE):
            got = gradients(model)
            held.append(saved_bytes(model))
        expected = got if expected is None else expected
        assert torch.equal(got, expected), choice
    # four equal regions share a graph, another budget never does, and the second "keep" finds the first one's
    assert compiled == [1.0, 0.5, 0.0]
    assert held[0] == held[3] > held[2]
    policy_module._backend.cache_clear()


@pytest.mark.parametrize("native", [True, False])
def test_more_budgets_than_dynamo_keeps_graphs_by_itself(monkeypatch, native):
    if native and not policy_module.has_region_budget():
        pytest.skip("this torch has no region_activation_memory_budget")
    if not native:
        monkeypatch.setattr(policy_module, "has_region_budget", lambda: False)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(32) for _ in range(2)]).bfloat16()
    limit = dynamo_config.recompile_limit  # type: ignore[attr-defined]
    with apply_policy(model, everywhere(model, "keep"), compile_kwargs=COMPILE):
        expected = gradients(model)
    for i in range(limit + 1):
        with apply_policy(model, everywhere(model, f"recompute@{i / 16}"), compile_kwargs=COMPILE):
            assert torch.equal(gradients(model), expected)
    assert dynamo_config.recompile_limit == limit  # type: ignore[attr-defined]


def sqnr_db(got: torch.Tensor, expected: torch.Tensor) -> float:
    return 10 * torch.log10(expected.square().sum() / (got - expected).square().sum()).item()


@pytest.fixture
def coded(monkeypatch) -> list[list[str]]:
    """Names of the tensors that each compiled graph codes."""
    names: list[list[str]] = []
    original = fused.code_saved

    def noting(*args):
        names.append(original(*args))
        return names[-1]

    monkeypatch.setattr(fused, "code_saved", noting)
    policy_module._backend.cache_clear()
    return names


def test_quantised_in_the_graph(model, coded):
    with apply_policy(model, everywhere(model, "keep"), compile_kwargs=COMPILE):
        expected, held = gradients(model), saved_bytes(model)
    with apply_policy(model, everywhere(model, "quantise_fused"), compile_kwargs=COMPILE):
        got, held_coded = gradients(model), saved_bytes(model)
    assert 25 < sqnr_db(got, expected) < 60
    # what gelu read is coded; its result is an operand of a matrix product in backward, and so is the region's input
    assert [len(names) for names in coded] == [1]
    rows, wide = 8 * 64, 128
    assert held - held_coded == len(model) * rows * wide


def test_under_a_budget_operands_are_made_again_from_codes(model, coded):
    held = {}
    for choice in ("recompute@0.9", "quantise_fused", "quantise_fused@0.9", "recompute"):
        with apply_policy(model, everywhere(model, choice), compile_kwargs=COMPILE):
            gradients(model)
            held[choice] = saved_bytes(model)
    rows, width, wide = 8 * 64, 32, 128
    # inputs and what gelu read; codes of the latter; nothing but inputs
    assert held["recompute@0.9"] == len(model) * rows * (2 * width + 2 * wide)
    assert held["quantise_fused@0.9"] == len(model) * rows * (2 * width + wide)
    assert held["quantise_fused"] > held["quantise_fused@0.9"] > held["recompute"]


class Normed(nn.Module):
    """Its input and its weight are read by a norm only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x * self.weight, (x.shape[-1],))


def test_inputs_are_coded_and_parameters_are_not(coded):
    torch._dynamo.reset()
    model = nn.Sequential(Normed(64)).bfloat16()
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    found = []
    for choice in ("keep", "quantise_fused@0.0"):
        x.grad = None
        model.zero_grad()
        with apply_policy(model, {"0": choice}, compile_kwargs=COMPILE):
            model(x).float().pow(3).sum().backward()
        weight = model[0].weight
        assert x.grad is not None
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is not None
        found.append(torch.cat([x.grad.float().flatten(), weight.grad.float().flatten()]))
    assert len(coded) == len(coded[0]) == 1
    assert 15 < sqnr_db(found[1], found[0]) < 60


class Heads(nn.Module):
    """A product of heads that gelu reads in the order of rows; with square heads a wrong order keeps the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(32, 16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = torch.bmm(x.view(-1, 32, 16).transpose(0, 1), self.mix)
        return torch.nn.functional.gelu(heads.permute(1, 0, 2)).reshape(x.shape)


def test_a_tensor_that_is_read_permuted_is_coded_as_it_is_read(coded):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Heads()).bfloat16()
    x = torch.randn(32, 32 * 16, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    found = []
    for choice in ("keep", "quantise_fused"):
        x.grad = None
        model.zero_grad()
        with apply_policy(model, {"0": choice}, compile_kwargs=COMPILE):
            model(x).float().pow(3).sum().backward()
        mix = model[0].mix
        assert x.grad is not None
        assert isinstance(mix, nn.Parameter)
        assert mix.grad is not None
        found.append(torch.cat([x.grad.float().flatten(), mix.grad.float().flatten()]))
    assert coded == [["bmm"]]
    assert 20 < sqnr_db(found[1], found[0]) < 60


def test_codes_leave_statistics_and_small_tensors_alone():
    assert not fused._codable(torch.randn(64, 1024))
    assert not fused._codable(torch.randn(64).bfloat16())
    x = torch.randn(64, 1024).bfloat16()
    assert fused._codable(x)
    codes = fused.encode(x)
    torch.testing.assert_close(codes.bfloat16(), x, rtol=0.125, atol=2.0**-17)
    assert sqnr_db(codes.float(), x.float()) > 25
    edges = torch.tensor([1e30, -6e4, float("nan"), 2.0**-20]).bfloat16()
    assert fused.encode(edges).float().nan_to_num(7.0).tolist() == [57344.0, -57344.0, 7.0, 0.0]


@pytest.mark.slow  # compiles C++
def test_recompute_compiled_by_inductor_is_bit_equal_where_precision_casts_are_emulated(model):
    options = {"options": {"emulate_precision_casts": True}}
    found = []
    for choice in ("keep", "recompute@0.9", "recompute"):
        with apply_policy(model, everywhere(model, choice), compile_kwargs=options):
            found.append(gradients(model))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.slow
def test_inductor_gets_the_coding_partitioner(model, coded):
    with apply_policy(model, everywhere(model, "keep"), compile_kwargs={}):
        expected = gradients(model)
    with apply_policy(model, everywhere(model, "quantise_fused@0.9"), compile_kwargs={}):
        got = gradients(model)
    assert [len(names) for names in coded] == [1]
    assert 25 < sqnr_db(got, expected) < 60


def test_other_backends_are_refused():
    with pytest.raises(ValueError, match="inductor's partitioner, got backend 'aot_eager'"):
        fused.coding_compiler("aot_eager", {})


def test_bad_choices():
    for text in ("recompute@", "recompute@2", "recompute@x", "quantise_fused@-1"):
        with pytest.raises(ValueError, match="within"):
            partitioner_budget(text)
    layer = Layer(8)
    for choice in ("quantise_fused", "recompute@0.3"):
        with pytest.raises(ValueError, match="compile_kwargs"):
            treated_forward(layer, layer.forward, choice, engine=None, codec=None, compile_kwargs=None)
