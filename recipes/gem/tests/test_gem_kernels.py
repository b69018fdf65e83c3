"""What the model runs on must not change what it computes: every choice of kernels against the default one."""

import dataclasses

import pytest
import torch
from gemworks.gem.config import EventConfig, GemConfig
from gemworks.gem.kernels import KernelConfig
from gemworks.gem.model import Gem
from gemworks.gem.model.events import MaskNetMerge
from gemworks.gem.presets import get_preset
from gemworks.gem.random_batch import random_batch
from gemworks.gem.schema import EventType, IdFeature, Schema
from gemworks.gem.typed_config import ConfigError
from torch.nn.functional import binary_cross_entropy_with_logits

pytestmark = pytest.mark.reference

ITEM = IdFeature(name="item", num_ids=40, table="item")
SCHEMA = Schema(
    ids=(IdFeature(name="user", num_ids=50, table="user"), ITEM),
    dense_names=("age", "rate"),
    events=(
        EventType(name="click", ids=(ITEM,), float_names=("price",)),
        EventType(name="view", ids=(ITEM,)),
    ),
    tasks=("click",),
)
LENGTHS = {"click": [0, 1, 70, 33, 64, 128, 5, 0], "view": [3, 65, 0, 100, 1, 0, 31, 0]}
PADDED = KernelConfig(layout="padded", attention="sdpa", pooling="sdpa", pffn="matmul", norm="torch", fused_qk=False)
KERNELS = {
    "padded": PADDED,
    "jagged, PFFN by products": KernelConfig(pffn="matmul", norm="torch", fused_qk=False),
    "unfused": KernelConfig(norm="torch", fused_qk=False),
    "attention goes back through its keys' norm": KernelConfig(fused_qk_backward=True),
    "norm in GDPA's kernel": KernelConfig(fused_pffn_norm=True),
    "PFFN's keys and values by one kernel": KernelConfig(pffn_weights="gemworks"),
    "residual with the next norms": KernelConfig(late_residual=True),
    "fewest passes": KernelConfig(fused_pffn_norm=True, fused_qk_backward=True, pffn_weights="gemworks"),
    "batched experts": KernelConfig(experts="batched"),
    "own schedules": KernelConfig(share_schedule=False),
    "float32 stream": KernelConfig(stream="float32"),
    "fp16 rotations": KernelConfig(rope_tables="float16"),
}
VARIANTS: dict[str, dict] = {
    "block": {},
    "full": {"attention": "full"},
    "window": {"attention": "window", "window": 3},
    "gdpa_pooling": {"pooling": "gdpa"},
    "fast_gelu": {"pffn_activation": "fast_gelu"},
    "buckets": {"time_encoding": "buckets"},
    "events": {"events": {"view": EventConfig(dim=128, num_heads=2, attention="full")}},
}


def run(kernels: KernelConfig, variant: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss on a fixed batch, and every gradient."""
    config: GemConfig = get_preset("tiny").with_model(**VARIANTS[variant])
    torch.manual_seed(0)
    model = Gem(SCHEMA, dataclasses.replace(config, kernels=kernels))
    batch = random_batch(SCHEMA, LENGTHS)
    loss = binary_cross_entropy_with_logits(model(batch), batch.labels_BK)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_padded_row_equals_its_jagged_row(variant: str):
    """The ladder's first row against the packed one: same loss, same gradients."""
    loss, gradients = run(KernelConfig(), variant)
    padded_loss, padded_gradients = run(PADDED, variant)
    torch.testing.assert_close(padded_loss, loss, rtol=1e-5, atol=1e-6)
    assert padded_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        size = float(gradient.abs().max())
        torch.testing.assert_close(padded_gradients[name], gradient, rtol=1e-3, atol=1e-4 * size + 1e-9, msg=name)


@pytest.mark.parametrize("kernels", [k for k in KERNELS if k != "padded"])
def test_kernels_change_nothing(kernels: str):
    loss, gradients = run(KernelConfig(), "block")
    other_loss, other_gradients = run(KERNELS[kernels], "block")
    half = 20.0 if kernels == "fp16 rotations" else 1.0  # rounds where the others only reorder sums
    torch.testing.assert_close(other_loss, loss, rtol=half * 1e-5, atol=half * 1e-6)
    for name, gradient in gradients.items():
        size = float(gradient.abs().max())
        bound = half * 1e-4 * size + 1e-9
        torch.testing.assert_close(other_gradients[name], gradient, rtol=half * 1e-3, atol=bound, msg=name)


def test_columns_padded_for_tensor_cores_change_nothing():
    """Values and every gradient of the merge of events, at a width of 21 padded to 24."""
    torch.manual_seed(0)
    merge = MaskNetMerge(21, 16, 32)
    columns = [torch.randn(50, n, requires_grad=True) for n in (8, 8, 5)]
    leaves = [*columns, *merge.parameters()]
    upstream = torch.randn(50, 32)
    results = []
    for multiple in (1, 8):
        out = merge.merge(columns, multiple=multiple)
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layout": "padded"}, "kernels.attention: got 'gemworks', expected 'sdpa'"),
        ({"attention": "sdpa"}, "kernels.attention: got 'sdpa', expected 'gemworks' or 'varlen'"),
        (
            {"layout": "padded", "attention": "sdpa", "pooling": "sdpa"},
            "kernels.pffn: got 'gemworks', expected 'matmul'",
        ),
        ({"pffn": "matmul", "fused_pffn_norm": True}, "kernels.fused_pffn_norm: got True"),
        ({"linears_min_features": 0}, "kernels.linears_min_features: got 0"),
    ],
)
def test_kernels_that_do_not_fit_together_are_refused(changes: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        KernelConfig(**changes)


def test_the_layers_alone_do_without_torchrec():
    """`layers` runs where torchrec is missing: neither it nor fbgemm may be imported by the layers' modules."""
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['torchrec'] = None; sys.modules['fbgemm_gpu'] = None\n"
        "import gemworks.gem.model.layer, gemworks.gem.model.tokens, gemworks.gem.model.head\n"
        "import gemworks.gem.layers.__main__"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
