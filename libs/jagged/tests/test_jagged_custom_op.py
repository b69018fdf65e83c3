"""Calls of our operators: past the dispatcher where nobody watches, through it where somebody does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gemworks.jagged import TileSchedule
from gemworks.jagged._custom_op import custom_op
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.reference


def _double(x: Tensor, y: Tensor | None, times: int) -> Tensor:
    return x * times if y is None else x * times + y


double = custom_op("double_for_tests", _double)
double.register_fake(lambda x, y, times: torch.empty_like(x))
double.register_autograd(
    lambda ctx, grad: (grad * ctx.times, None, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "times", inputs[2]),
)


class Seen(TorchDispatchMode):
    """The names of what torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Refuses:
    """In place of the operator's overload: shows that a call went through the dispatcher."""

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("dispatched")


@pytest.mark.parametrize("grad", [False, True])
def test_plain_tensors_pass_no_dispatcher(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, requires_grad=grad)
    through = double.overload(x, None, 2)
    monkeypatch.setattr(double, "overload", Refuses())
    direct = double(x, None, 2)
    assert torch.equal(direct, through)
    assert direct.requires_grad is grad
    if grad:
        assert torch.equal(torch.autograd.grad(direct.sum(), x)[0], torch.autograd.grad(through.sum(), x)[0])
    with torch.no_grad():
        assert not double(x, x, 2).requires_grad
    with torch.inference_mode():
        assert double(x, None, 2).is_inference()


def test_modes_transforms_and_profilers_see_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, requires_grad=True)
    with Seen() as seen:
        torch.autograd.grad(double(x, None, 2).sum(), x)
    assert double.name in seen.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        double(x, None, 2)
    assert double.name in {event.key for event in profile.key_averages()}
    with FakeTensorMode():
        fake = torch.empty(3)
    monkeypatch.setattr(double, "overload", Refuses())
    with pytest.raises(AssertionError, match="dispatched"):
        double(fake, None, 2)
    with pytest.raises(AssertionError, match="dispatched"):
        torch.func.grad(lambda t: double(t, None, 2).sum())(torch.ones(3))


def test_a_compiled_call_is_one_node_and_agrees() -> None:
    x = torch.ones(3, requires_grad=True)
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    out = torch.compile(lambda t: double(t, None, 3), fullgraph=True, backend=keep)(x)
    assert [n.target for n in graphs[0].graph.nodes if n.op == "call_function"] == [double.overload]
    assert torch.equal(out, double(x, None, 3))
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full((3,), 3.0))


def test_an_operator_whose_first_tensor_is_missing() -> None:
    schedule = TileSchedule.build(None, torch.tensor([0, 5]), total_q=3, total_k=5, heights="q128")
    tiles = schedule.tiles("q128")
    assert tiles is not None
    assert int(tiles[2, 0]) == 1
