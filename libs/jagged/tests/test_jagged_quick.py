"""Launches by `quick`: what it tells apart, what it hands to a compiled kernel, and when it takes the long way."""

from __future__ import annotations

import itertools
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
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
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


def test_a_watched_launch_takes_the_long_way(kernel: Kernel, monkeypatch: pytest.MonkeyPatch):
    run, x = Quick(kernel), torch.zeros(64)  # pyright: ignore[reportArgumentType]
    hooks = SimpleNamespace(launch_enter_hook=lambda metadata: None, launch_exit_hook=None)
    monkeypatch.setattr(module, "knobs", SimpleNamespace(runtime=hooks))
    for _ in range(2):
        run[(4,)](x, 32, BLOCK=16, FLAG=True)
    assert (len(kernel.slow), len(kernel.fast)) == (2, 0)
