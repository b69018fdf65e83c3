"""On a GPU: what the benchmark checks before it times anything, as tests. Bit-equality, contract, bounds, sizes."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from gemworks.precision import bench_checks
from gemworks.precision.backends import PrecisionCostWarning

pytestmark = [
    pytest.mark.gpu,
    # mxfp8 on Hopper says once that it multiplies in bf16; that is what is checked here
    pytest.mark.filterwarnings(f"ignore::{PrecisionCostWarning.__module__}.{PrecisionCostWarning.__name__}"),
]


@pytest.mark.parametrize("name", list(bench_checks.CHECKS))
def test_check_of_the_benchmark(name):
    """P1 to P8 on the device: each check raises with the op, shape and dtype that is wrong."""
    bench_checks.CHECKS[name](torch.device("cuda"))
