"""A product that adds to the residual stream, on a GPU: values, gradients, and no pass that copies the stream."""

import pytest
import torch
from gemworks.gem.model.layers import linear
from gemworks.gem.model.residual import add_linear
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler imports a module of torch that uses what torch deprecates.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_product_adds_to_what_the_norm_wrote():
    torch._dynamo.reset()
    torch.manual_seed(0)
    device = torch.device("cuda")
    project, back = (linear(512, 512, bias=False, device=device) for _ in range(2))
    s = torch.randn(5000, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    cotangent = torch.randn_like(s)
    leaves = (s, project.weight, back.weight)

    def block(s: Tensor) -> Tensor:
        return add_linear(s, project(functional.rms_norm(s, (512,), eps=1e-6)), back)

    compiled = torch.compile(block, fullgraph=True)

    def run() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            out = compiled(s)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]

    before = s.detach().clone()
    found = run()
    assert torch.equal(s, before)
    exact = block(s.float())
    wanted = [exact.detach(), *torch.autograd.grad(exact, leaves, cotangent.float())]
    for a, b in zip(found, wanted, strict=True):
        error = float((a.double() - b.double()).norm() / b.double().norm())
        assert error < 1e-2, error
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in trace.events() or []]
    assert any("nvjet" in name or "gemm" in name for name in names)
    assert not any("memcpy" in name.lower() for name in names), names
