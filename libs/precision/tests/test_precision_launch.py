"""Remembered launches: one compiled kernel for each thing that Triton compiles differently for."""

import ast
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gemworks.precision import launch

pytestmark = pytest.mark.reference


class Compiled:
    packed_metadata, function = (), None

    def __init__(self, log, name):
        self.log, self.name = log, name

    def run(self, x, y, z, stream, function, metadata, _launch, _enter, _exit, *arguments):
        self.log.append((self.name, (x, y, z), stream, arguments))


class Kernel:
    """Stands for a jitted function of `x_ptr, size, SCALE, FLAG`."""

    arg_names = ("x_ptr", "size", "SCALE", "FLAG")

    def __init__(self):
        self.log = []

    def __getitem__(self, grid):
        def run(*arguments, **keywords):
            self.log.append(("looked up", grid, arguments, keywords))
            return Compiled(self.log, keywords["SCALE"])

        return run


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)

    def get_device(self) -> int:
        return 0


class OnSecondDevice(OnDevice):
    """Another one, on the next GPU."""

    device = torch.device("cuda", 1)

    def get_device(self):
        return 1


@pytest.fixture
def on_device(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77 + index, raising=False)
    monkeypatch.setattr(launch, "_launchers", {})
    monkeypatch.setattr(torch.cuda, "device", lambda _: __import__("contextlib").nullcontext())
    return torch.zeros(4, dtype=torch.uint8).as_subclass(OnDevice)


def test_the_second_launch_takes_constants_in_the_kernels_order(on_device):
    kernel = Kernel()
    for size in (32, 64):
        launch.launch(kernel, (4, 1, 1), (on_device, size), {"FLAG": True, "SCALE": 7}, {"num_warps": 4})
    (how, *_), (again, grid, stream, arguments) = kernel.log
    assert (how, again) == ("looked up", 7)
    assert grid == (4, 1, 1)
    assert stream == 77
    assert arguments == (on_device.data_ptr(), 64, 7, True)


def test_kernels_start_on_the_device_of_their_tensors(on_device, monkeypatch):
    """The current device is 0 before and after; the stand-in for Triton starts on the current one, as Triton does."""
    current, entered, started = [0], [], []

    @contextmanager
    def device(which):
        index = which if isinstance(which, int) else which.index
        entered.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    class Here(Kernel):
        def __getitem__(self, grid):
            run = super().__getitem__(grid)
            return lambda *arguments, **keywords: started.append(current[0]) or run(*arguments, **keywords)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(Compiled, "run", lambda self, x, y, z, stream, *_: started.append((current[0], stream)))
    kernel, there = Here(), on_device.as_subclass(OnSecondDevice)
    for x in (on_device, there, on_device, there):
        launch.launch(kernel, (4, 1, 1), (x, 32), {"FLAG": True, "SCALE": 7}, {"num_warps": 4})
    assert started == [0, 1, (0, 77), (1, 78)]
    assert entered == [0, 1, 1], "no guard around a remembered launch on the current device"
    assert current == [0]


def test_no_module_starts_a_kernel_but_by_launch():
    """A subscript of a kernel, `kernel[grid]`, and the call of a subscript by whatever name stand in `launch.py` alone,
    which knows the device."""
    starts, names = [], set()
    for path in sorted(Path(launch.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        kernels = {a.asname or a.name for a in _kernel_imports(tree)}
        names |= kernels
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call)
            subscript = node.func if isinstance(node, ast.Call) else node
            if isinstance(subscript, ast.Subscript):
                name = ast.unparse(subscript.value)
                if (called and not name.isupper()) or name in kernels:  # capitals: tables of functions
                    starts.append((path.name, name))
    assert starts == [("launch.py", "self.kernel")] * 2
    assert len(names) > 15, "the search finds kernels"


def _kernel_imports(tree: ast.AST) -> list[ast.alias]:
    """Of `from ...kernel_x import y`; constants in capitals are not kernels."""
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    of_kernels = [n for n in imports if (n.module or "").rsplit(".", 1)[-1].startswith("kernel_")]
    return [a for n in of_kernels for a in n.names if not a.name.isupper()]


def test_the_first_launch_takes_words(on_device):
    kernel = Kernel()
    launch.launch(kernel, (1, 1, 1), (on_device, 32), {"FLAG": True, "SCALE": 7}, {}, ("a",), (torch.int32,))
    assert kernel.log[0][2][0].dtype is torch.int32


@pytest.mark.parametrize(
    ("size", "scale", "warps"), [(1, 7, 4), (33, 7, 4), (2**40, 7, 4), (32, 8, 4), (32, 7, 8)], ids=str
)
def test_what_compiles_to_another_kernel_is_looked_up(on_device, size, scale, warps):
    kernel = Kernel()
    launch.launch(kernel, (4, 1, 1), (on_device, 32), {"FLAG": True, "SCALE": 7}, {"num_warps": 4})
    launch.launch(kernel, (4, 1, 1), (on_device, size), {"FLAG": True, "SCALE": scale}, {"num_warps": warps})
    assert [entry[0] for entry in kernel.log] == ["looked up", "looked up"]


def test_dtype_and_alignment_of_tensors():
    x = torch.empty(64, dtype=torch.uint8)
    assert launch.specialisation(x) == launch.specialisation(x[16:])
    assert launch.specialisation(x) != launch.specialisation(x[1:])
    assert launch.specialisation(x) != launch.specialisation(x.view(torch.int32))


def test_a_key_of_the_caller_replaces_the_look_at_the_arguments(on_device):
    kernel = Kernel()
    for size, key in ((32, ("a",)), (33, ("a",)), (33, ("b",))):
        launch.launch(kernel, (4, 1, 1), (on_device, size), {"FLAG": True, "SCALE": 7}, {"num_warps": 4}, key)
    assert [entry[0] for entry in kernel.log] == ["looked up", 7, "looked up"]


def test_launchers_keep_their_kernels(on_device):
    """A number that Python gives to another function later must not find the first one's compiled kernels."""
    kernel = Kernel()
    launcher = launch.launcher_of(kernel)
    assert launcher.kernel is kernel
    assert launch.launcher_of(kernel) is launcher
    assert launch.launcher_of(Kernel()) is not launcher


class CudaLauncher:
    """As Triton 3.6's: asks for scratch memory and hands on."""

    global_scratch_size = profile_scratch_size = 0
    cooperative = False
    reorder = False

    def __init__(self, log):
        self.launch = lambda *arguments: log.append(arguments)

    def __call__(self, x, y, z, stream, function, *arguments):
        if self.reorder:
            arguments = (*arguments[:4], arguments[4:])
        self.launch(x, y, z, stream, function, self.cooperative, "scratch", *arguments)


@pytest.mark.parametrize(
    ("scratch", "reorder", "direct"), [(0, False, True), (8, False, False), (0, True, False)], ids=str
)
def test_the_launchers_own_function_is_started_where_it_gets_the_same(monkeypatch, scratch, reorder, direct):
    monkeypatch.setattr(CudaLauncher, "global_scratch_size", scratch)
    monkeypatch.setattr(CudaLauncher, "reorder", reorder)
    log = []
    compiled = SimpleNamespace(run=CudaLauncher(log), function="function", packed_metadata="metadata")
    start, head = launch._entry(compiled)
    assert log == []
    assert (start is compiled.run.launch) is direct
    start(1, 2, 3, 77, *head, 11, 12)
    compiled.run(1, 2, 3, 77, "function", "metadata", None, None, None, 11, 12)
    assert log[0] == log[1]


def test_tritons_own_launcher_is_known():
    """What is started directly, of the Triton that is installed: its launcher handed on to a function of ours."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    log = []
    compiled = SimpleNamespace(run=object.__new__(driver.CudaLauncher), function=None, packed_metadata=())
    compiled.run.__dict__.update(
        launch=lambda *a: log.append(a), num_ctas=1, global_scratch_size=0, global_scratch_align=1,
        profile_scratch_size=0, profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False,
        arg_annotations="annotations", kernel_signature="signature",
    )  # fmt: skip
    start, head = launch._entry(compiled)
    start(1, 2, 3, 77, *head, 11, 12)
    compiled.run(1, 2, 3, 77, None, (), None, None, None, 11, 12)
    assert log[0] == log[1]
