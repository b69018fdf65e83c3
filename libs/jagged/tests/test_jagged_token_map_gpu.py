"""The token map on a GPU: values and gradients against float64, poison, repeats, no waiting, one compiled graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import token_map
from gemworks.jagged.ops.token_map.op import MAX_IN, MAX_OUT, token_map_op
from gemworks.jagged.ops.token_map.reference import token_map_reference
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler imports a module of torch that uses what torch deprecates.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ERROR = {torch.bfloat16: 6e-3, torch.float16: 1e-3}  # relative, in the norm; a rounding of bf16 is 2e-3
SHAPES = [(512, 32, 256, 512), (1, 1, 1, 1), (300, 17, 100, 70), (133, MAX_IN, MAX_OUT, 129), (7, 3, 16, 2048)]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` on the device returns NaN, so that a row nobody writes is seen."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_cuda and x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype).requires_grad_()


def leaves(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_samples, num_in, num_out, width = shape
    x, dy = (random(num_samples, n, width, seed=n, dtype=dtype) for n in (num_in, num_out))
    return x, random(num_out, num_in, seed=2), random(num_out, width, seed=3), dy.detach()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", list(ERROR), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_gradients_and_repeats(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x, weight, base, dy = leaves(shape, dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, weight.to(dtype), base)]
    truth = token_map_reference(*exact)
    y = token_map(x, weight, base)
    found = torch.autograd.grad(y, (x, weight, base), dy, retain_graph=True)
    wanted = torch.autograd.grad(truth, exact, dy.double())
    assert [t.dtype for t in (y, *found)] == [dtype, dtype, torch.float32, torch.float32]
    for name, a, b in zip(("y", "dx", "dweight", "dbase"), (y, *found), (truth, *wanted), strict=True):
        error = float((a.detach().double() - b.detach()).norm() / b.detach().norm())
        assert error <= ERROR[dtype], f"{name}: {error:.1e}"
    for _ in range(9):
        again = torch.autograd.grad(y, (x, weight, base), dy, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))
        assert torch.equal(token_map(x, weight, base), y)


def test_more_tokens_than_the_kernels_take_go_to_the_reference() -> None:
    x, weight, base, dy = leaves((3, MAX_IN + 1, 5, 64), torch.bfloat16)
    y = token_map(x, weight, base)
    assert torch.equal(y, token_map_reference(x, weight, base))
    torch.autograd.grad(y, (x, weight, base), dy)


def test_the_op_keeps_the_rules_of_torch_library() -> None:
    x, weight, base, _ = leaves((3, 4, 5, 64), torch.bfloat16)
    torch.library.opcheck(token_map_op.overload, (x, weight, base))


def test_one_graph_for_every_batch_and_no_waiting() -> None:
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(token_map, backend=counting, fullgraph=True, dynamic=True)
    for num_samples in (5, 9):  # 4 is the number of tokens too, and torch takes equal sizes for one
        x, weight, base, dy = leaves((num_samples, 4, 16, 64), torch.bfloat16)
        torch.autograd.grad(compiled(x, weight, base), (x, weight, base), dy)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = compiled(x, weight, base)
            found = torch.autograd.grad(y, (x, weight, base), dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        eager = token_map(x, weight, base)
        assert torch.equal(y, eager)
        wanted = torch.autograd.grad(eager, (x, weight, base), dy)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert graphs == 1
