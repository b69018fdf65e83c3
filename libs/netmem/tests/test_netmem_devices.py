"""Tensors on a second GPU while the first is current: work goes to the device and the stream of its tensors."""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gemworks.netmem import meters
from gemworks.netmem.codec import get_codec


def test_every_kernel_starts_on_the_device_of_an_argument():
    """Triton starts on the current device: each launch stands in `with torch.cuda.device_of(x)`, x one of its own."""
    source = Path(meters.__file__).parent
    guarded, launches = 0, 0
    for path in source.rglob("*.py"):
        tree = ast.parse(path.read_text())
        launches += len(kernel_launches(tree))
        for node in ast.walk(tree):
            if not isinstance(node, ast.With):
                continue
            (item, *_) = (ast.unparse(i.context_expr) for i in node.items)
            given = [{ast.unparse(a) for a in call.args} for call in kernel_launches(node)]
            guarded += sum(item.removeprefix("torch.cuda.device_of(")[:-1] in names for names in given)
    assert guarded == launches >= 4


def kernel_launches(tree):
    """Calls `x_kernel[grid](...)`."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)]
    return [call for call in calls if ast.unparse(call.func).partition("[")[0].endswith("_kernel")]


def test_the_clock_of_a_profile_is_that_of_its_device(monkeypatch):
    """Events are recorded, and the sleep starts, on the current device's stream: that has to be the model's."""
    current, seen = [0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            seen.append(("event", current[0]))

        def elapsed_time(self, end):
            return 2.0

    @contextmanager
    def device(which):
        before, current[0] = current[0], which.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append(("synchronize", current[0])))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append(("sleep", current[0])), raising=False)
    assert meters.Clock(torch.device("cuda", 1))(lambda: "out") == ("out", 2e-3)
    assert [name for name, _ in seen] == ["synchronize", "sleep", "event", "event", "synchronize"]
    assert {place for _, place in seen} == {1}
    assert current == [0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["fp8_row", "fp8_block128", "mxfp8", "sum"])
def test_kernels_start_on_the_device_and_stream_of_their_tensors(name):
    """The input is still being written by a side stream of the second GPU when the kernels are started; cuda:0 is
    current."""
    from gemworks.netmem import kernel_codec

    def call(x):
        if name == "sum":
            out = torch.empty_like(x[0])
            kernel_codec.sum_parts(x[0], x, 0, out, mean=False)
            return out
        codec = get_codec(name)
        return codec.decode(codec.encode(x), x.shape, x.dtype)

    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.cuda.set_device(0)
    expected = call(values.cuda(0))
    late, x = values.cuda(1), torch.full_like(values, float("nan"), device="cuda:1")
    call(late)  # compiles
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(1)
    with torch.cuda.stream(stream):
        torch.cuda.set_device(0)
        with torch.cuda.device(1):
            torch.cuda._sleep(50_000_000)
        x.copy_(late, non_blocking=True)
        found = call(x)
        assert torch.cuda.current_device() == 0
        stream.synchronize()
    assert found.device == torch.device("cuda", 1)
    assert torch.equal(found.cpu(), expected.cpu())
