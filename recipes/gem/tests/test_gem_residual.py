"""A product that adds to the residual stream: values, gradients, and that no pass copies the stream for it."""

import pytest
import torch
from gemworks.gem.model.layers import linear
from gemworks.gem.model.residual import add_linear, add_product_
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

pytestmark = [
    pytest.mark.reference,
    # what torch's own compiler imports and looks at
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


def both(stream: torch.dtype, autocast: bool, backend: str) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients, compiled and as written."""
    torch.manual_seed(0)
    layer = linear(24, 16, bias=False)
    s = torch.randn(40, 16, dtype=stream).requires_grad_()
    x = torch.randn(40, 24, dtype=torch.bfloat16 if autocast else stream).requires_grad_()

    def add(s: Tensor, x: Tensor) -> Tensor:
        return add_linear(s, torch.sin(x), layer)

    found = []
    for f in (torch.compile(add, backend=backend, fullgraph=True), add):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = f(s, x)
        cotangent = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
        found.append([out.detach(), *torch.autograd.grad(out, (s, x, layer.weight), cotangent)])
    return found[0], found[1]


@pytest.mark.parametrize(
    ("stream", "autocast"), [(torch.float32, False), (torch.bfloat16, True), (torch.float32, True)], ids=str
)
def test_values_and_gradients_are_those_of_the_sum(stream: torch.dtype, autocast: bool):
    found, wanted = both(stream, autocast, "aot_eager")
    rtol = 2e-2 if autocast else 1e-5
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))


def test_the_kernel_of_the_norm_writes_what_the_product_adds_to():
    """One elementwise kernel: the copy of the stream is a second result of the norm's."""
    project, back = (linear(16, 16, bias=False).to(torch.bfloat16) for _ in range(2))

    def block(s: Tensor) -> Tensor:
        return add_linear(s, project(functional.rms_norm(s, (16,), eps=1e-6)), back)

    s = torch.randn(40, 16, dtype=torch.bfloat16)
    wanted, before = block(s), s.clone()
    with torch.no_grad():
        found, (code,) = run_and_get_code(torch.compile(block, fullgraph=True), s)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    assert torch.equal(s, before)
    calls = code[code.index("def call(") :]
    assert "add_product_" in calls
    assert calls.count("cpp_fused") == 1, calls
    assert "addmm" not in calls


def test_the_op_keeps_the_rules_of_torch_library():
    into, x, weight = torch.randn(6, 4), torch.randn(6, 8), torch.randn(4, 8)
    torch.library.opcheck(add_product_, (into, x, weight))
