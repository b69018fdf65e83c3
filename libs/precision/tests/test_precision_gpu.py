"""On a GPU: what the benchmark checks before it times anything, as tests. Bit-equality, contract, bounds, sizes."""

import importlib.util

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from gemworks.precision import bench_checks, bench_gemm_checks, constants, recipe

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def failures():
    """All checks at once, each in a process: compiling their kernels one after another would take minutes."""
    return bench_checks.run_in_processes(list(bench_checks.CHECKS))


@pytest.mark.parametrize("name", list(bench_checks.CHECKS))
def test_check_of_the_benchmark(name, failures):
    """P1 to P8 on the device: each check raises with the op, shape and dtype that is wrong."""
    assert name not in failures, failures[name]


TRANSFORMER_ENGINE = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="transformer_engine not installed"
)


@TRANSFORMER_ENGINE
@pytest.mark.parametrize(
    "chosen",
    [recipe("fp8_block128"), recipe("fp8_tensor"), bench_gemm_checks.tensor_recipe(power_of_two_scales=True)],
    ids=["block", "current", "current-e4m3-powers"],
)
def test_transformer_engine_agrees_with_ours(chosen):
    """P5: what the registry says of it, run: y, dx and dw of its block and of its current scaling against ours."""
    bench_gemm_checks.check_transformer_engine(torch.device("cuda"), chosen)


@TRANSFORMER_ENGINE
def test_codes_of_its_current_scaling_are_ours():
    """P1, P5: two kernels of two libraries, the same bits."""
    bench_gemm_checks.check_current_scaling_codes(torch.device("cuda"))


def test_zeros_that_a_captured_graph_made_first_are_not_kept(monkeypatch):
    """They lie in the graph's memory; those that are kept do not."""
    monkeypatch.setattr(constants, "_made", {})
    device, graph = torch.device("cuda", torch.cuda.current_device()), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = constants.kept_zeros(device, torch.int64, 2)
    graph.replay()
    kept = constants.kept_zeros(device, torch.int64, 2)
    assert kept is not inside
    assert constants.kept_zeros(device, torch.int64, 2) is kept
    inside.fill_(7)
    assert kept.tolist() == [0, 0]
