"""Launches by `quick`: what it tells apart, what it hands to a compiled kernel, and when it takes the long way."""

from __future__ import annotations

import ast
import itertools
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from gemworks.jagged._triton import quick as module  # noqa: E402
from gemworks.jagged._triton.quick import Quick, look  # noqa: E402


def test_what_triton_tells_apart_looks_different():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import native_specialize_impl

    backend = make_backend(GPUTarget("cuda", 90, 32))
    base = torch.zeros(64, dtype=torch.bfloat16)
    values = [0, 1, -1, 2, 16, 17, -16, 1 << 31, (1 << 31) + 1, -(1 << 31), 1 << 40, 0.5, True, None]
    values += [base, base[1:], base[8:], base.to(torch.float32), base.to(torch.int32)]
    seen: list[tuple[Any, Any]] = [(native_specialize_impl(backend, x, False, True, True), look(x)) for x in values]
    for (a, look_a), (b, look_b) in itertools.combinations(seen, 2):
        assert a == b or look_a != look_b, (a, b)


def test_every_kernel_has_its_constants_last():
    from gemworks.jagged.ops.attention_core import launch
    from gemworks.jagged.ops.block_attention import launch as block_launch
    from gemworks.jagged.ops.gdpa import launch_epilogue
    from gemworks.jagged.ops.norms import launch as norm_launch
    from gemworks.jagged.ops.rope import launch as rope_launch

    for launches in (launch, block_launch, launch_epilogue, norm_launch, rope_launch):
        found = [x for x in vars(launches).values() if isinstance(x, Quick)]
        assert found, launches.__name__
        _check_constants(found)


def _check_constants(kernels: list[Quick]) -> None:
    for kernel in kernels:
        constant = [p.is_constexpr for p in kernel.kernel.params]
        assert constant == sorted(constant), kernel.kernel


class Kernel:
    """A jitted function as `Quick` sees it."""

    def __init__(self) -> None:
        names = (("x", False), ("n", False), ("BLOCK", True), ("FLAG", True))
        self.params = [SimpleNamespace(name=n, is_constexpr=c, default=None) for n, c in names]
        self.slow: list[Any] = []
        self.fast: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def start(*args: Any, **constants: Any) -> Any:
            self.slow.append((grid, args, constants))
            return SimpleNamespace(run=lambda *a: self.fast.append(a), function="f", packed_metadata="m")

        return start


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # where the host's tensors are
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return Kernel()


def test_a_launch_like_one_before_goes_to_the_compiled_kernel(kernel: Kernel):
    run, x = Quick(kernel), torch.zeros(64)  # pyright: ignore[reportArgumentType]
    for n in (32, 48, 64):
        run[(n,)](x, n, FLAG=True, BLOCK=16)
    assert len(kernel.slow) == 1
    first, second = kernel.fast
    assert first == (48, 1, 1, 7, "f", "m", None, None, None, x.data_ptr(), 48, 16, True)
    assert second[:1] == (64,)


@pytest.mark.parametrize("change", ["alignment", "one", "constant", "dtype"])
def test_another_kind_of_launch_is_compiled_anew(kernel: Kernel, change: str):
    run, x = Quick(kernel), torch.zeros(64)  # pyright: ignore[reportArgumentType]
    run[(4,)](x, 32, BLOCK=16, FLAG=True)
    y = {"alignment": x[1:], "dtype": x.to(torch.int32)}.get(change, x)
    run[(4,)](y, 1 if change == "one" else 32, BLOCK=32 if change == "constant" else 16, FLAG=True)
    assert (len(kernel.slow), len(kernel.fast)) == (2, 0)


class OnDevice(torch.Tensor):
    """A tensor that says which GPU it is on."""

    gpu = 0

    def get_device(self) -> int:
        return self.gpu


class Second(OnDevice):
    gpu = 1


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("of", ["tensor", "descriptor"])
def test_kernels_start_on_the_device_of_their_first_argument(
    of: str, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for Triton that starts, as Triton does, on the current device, which is 0 before and after."""
    current, started, entered = [0], [], []

    @contextmanager
    def device(index: int) -> Any:
        entered.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    class OnTheCurrentDevice(Kernel):
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **_: started.append((current[0], None)) or SimpleNamespace(
                run=lambda x, y, z, stream, *rest: started.append((current[0], stream)),
                function="f", packed_metadata="m",
            )  # fmt: skip

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    if watched:
        hooks = SimpleNamespace(launch_enter_hook=lambda metadata: None, launch_exit_hook=None)
        monkeypatch.setattr(module, "knobs", SimpleNamespace(runtime=hooks))
    run, data = Quick(OnTheCurrentDevice()), torch.zeros(64)  # pyright: ignore[reportArgumentType]
    first, second = data.as_subclass(OnDevice), data.as_subclass(Second)
    for x in (first, second, first, second):
        shape: list[Any] = [64]
        wrapped = SimpleNamespace(base=x, block_shape=shape, layout="l", strides=shape)
        run[(4,)](x if of == "tensor" else wrapped, 32, BLOCK=16, FLAG=True)
    assert [place for place, _ in started] == [0, 1, 0, 1]
    assert [stream for _, stream in started] == ([None] * 4 if watched else [None, None, 70, 71])
    assert entered == [1, 1], "no guard where the device is current"
    assert current == [0]


def test_no_module_starts_a_kernel_but_by_quick() -> None:
    """Names from modules of kernels are given to `quick`, which knows the device, or they are no kernels."""
    found = 0
    source = Path(module.__file__).parent.parent
    for path in source.rglob("*.py"):
        if path.name.startswith("kernel_") or path.parent.name == "_triton":
            continue
        tree = ast.parse(path.read_text())
        names = {a.asname or a.name for a in _kernel_imports(tree)}
        wrapped = {id(n) for call in ast.walk(tree) if _is_quick(call) for n in ast.walk(call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in names:
                assert id(node) in wrapped, f"{path.name}:{node.lineno}: {node.id}"
                found += 1
    assert found > 15


def _kernel_imports(tree: ast.AST) -> list[ast.alias]:
    """Of `from ...kernel_x import y` and `from ... import kernel_x`; constants in capitals are not kernels."""
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    return [
        a
        for n in imports
        for a in n.names
        if ((n.module or "").rsplit(".", 1)[-1].startswith("kernel_") and not a.name.isupper())
        or a.name.startswith("kernel_")
    ]


def _is_quick(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "quick"


def test_torch_is_asked_once_about_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Architecture and multiprocessors by index; a device without one is the current one, whichever that is then."""
    from gemworks.jagged import dispatch

    asked, current = [], [7]

    def properties(index: int) -> Any:
        asked.append(index)
        return SimpleNamespace(major=9, minor=index % 2, multi_processor_count=100 + index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    dispatch._gpu.cache_clear()
    for index in (7, 8, 7):
        current[0] = index
        for device in (torch.device("cuda", index), f"cuda:{index}", "cuda"):
            assert dispatch.architecture_of(device) == f"sm_9{index % 2}"
        assert dispatch.num_multiprocessors(torch.device("cuda")) == 100 + index
    assert asked == [7, 8]
    dispatch._gpu.cache_clear()
    assert dispatch.architecture_of("cpu") == "cpu"


def test_a_watched_launch_takes_the_long_way(kernel: Kernel, monkeypatch: pytest.MonkeyPatch):
    run, x = Quick(kernel), torch.zeros(64)  # pyright: ignore[reportArgumentType]
    hooks = SimpleNamespace(launch_enter_hook=lambda metadata: None, launch_exit_hook=None)
    monkeypatch.setattr(module, "knobs", SimpleNamespace(runtime=hooks))
    for _ in range(2):
        run[(4,)](x, 32, BLOCK=16, FLAG=True)
    assert (len(kernel.slow), len(kernel.fast)) == (2, 0)
