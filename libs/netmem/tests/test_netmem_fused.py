"""Compiled regions: graphs are shared per budget and never across budgets; quantised saved activations in the graph."""

from __future__ import annotations

import pytest
import torch
from gemworks.netmem import policy as policy_module
from gemworks.netmem.fused import pack, unpack
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

    def counting(inner, options):
        compiler = original(inner, options)

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


def test_quantised_in_the_graph(model):
    with apply_policy(model, everywhere(model, "keep"), compile_kwargs=COMPILE):
        expected, held = gradients(model), saved_bytes(model)
    with apply_policy(model, everywhere(model, "quantise_fused"), compile_kwargs=COMPILE):
        got, held_coded = gradients(model), saved_bytes(model)
    sqnr_db = 10 * torch.log10(expected.square().sum() / (got - expected).square().sum())
    assert 25 < sqnr_db < 60
    assert held_coded < 0.75 * held  # inputs of the graph stay as they are


def test_quantised_and_recomputed_at_once(model):
    held = {}
    for choice in ("quantise_fused", "quantise_fused@1.0", "quantise_fused@0.0", "recompute"):
        with apply_policy(model, everywhere(model, choice), compile_kwargs=COMPILE):
            gradients(model)
            held[choice] = saved_bytes(model)
    assert held["quantise_fused"] == held["quantise_fused@1.0"] > held["quantise_fused@0.0"]
    assert held["quantise_fused@0.0"] <= held["recompute"]


def test_pack_leaves_statistics_and_small_tensors_alone():
    wide = torch.randn(64, 1024)
    assert pack(wide) is wide
    small = torch.randn(64).bfloat16()
    assert unpack(pack(small)) is small
    x = torch.randn(64, 1024).bfloat16()
    codes, dtype = pack(x)
    assert (codes.dtype, dtype) == (torch.float8_e5m2, torch.bfloat16)
    torch.testing.assert_close(unpack((codes, dtype)), x, rtol=0.125, atol=2.0**-17)
    sqnr_db = 10 * torch.log10(x.float().square().sum() / (unpack((codes, dtype)) - x).float().square().sum())
    assert sqnr_db > 25
    edges = torch.tensor([1e30, -6e4, float("nan"), 2.0**-20]).bfloat16().repeat(1 << 12)
    assert unpack(pack(edges))[:4].nan_to_num(7.0).tolist() == [57344.0, -57344.0, 7.0, 0.0]


def test_bad_choices():
    for text in ("recompute@", "recompute@2", "recompute@x", "quantise_fused@-1"):
        with pytest.raises(ValueError, match="within"):
            partitioner_budget(text)
    layer = Layer(8)
    for choice in ("quantise_fused", "recompute@0.3"):
        with pytest.raises(ValueError, match="compile_kwargs"):
            treated_forward(layer, layer.forward, choice, engine=None, codec=None, compile_kwargs=None)
