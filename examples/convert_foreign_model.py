"""FP8 in a model that somebody else wrote: torchrec's DLRM with a deep-and-cross network, as its package has it.

`probe` measures every linear layer on real batches and writes a recipe; `convert` puts it into the model in place.
Layers that FP8 does not suit stay as they are, and say why. The state dict keeps its names and values.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from gemworks.precision import convert, probe, revert
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

NUM_IDS, D, NUM_DENSE, B = 200, 64, 16, 256
Batch = tuple[Tensor, KeyedJaggedTensor, Tensor]


def make_model() -> nn.Module:
    tables = [
        EmbeddingBagConfig(name=f"t_{f}", embedding_dim=D, num_embeddings=NUM_IDS, feature_names=[f]) for f in "abc"
    ]
    return DLRM_DCN(EmbeddingBagCollection(tables=tables), NUM_DENSE, [256, D], [256, 128, 1], 2, 64)


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(B, NUM_DENSE, generator=generator)
    ids = KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.randint(0, NUM_IDS, (3 * B,), generator=generator),
        lengths=torch.ones(3 * B, dtype=torch.long),
    )
    return dense, ids, (dense[:, 0] + dense[:, 1] * dense[:, 2] > 0).float()


def loss_of(model: nn.Module, one: Batch) -> Tensor:
    dense, ids, labels = one
    return nn.functional.binary_cross_entropy_with_logits(model(dense, ids).squeeze(1), labels)


def trained(model: nn.Module, num_steps: int) -> float:
    """The mean loss of some steps of training."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / num_steps


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning, message=".*no FP8.*")
    torch.manual_seed(0)
    model = make_model()
    names = list(model.state_dict())
    report = probe(model, [batch(0), batch(1)], loss_of, candidates=("mxfp8",))
    with tempfile.TemporaryDirectory() as folder:
        report.save_file(Path(folder) / "recipe.toml")
        converted = convert(model, str(Path(folder) / "recipe.toml"))
    print(converted)
    chosen = [layer.name for layer in report.layers if layer.decision == "mxfp8"]
    assert chosen, "some layer is wide enough for FP8"
    assert list(model.state_dict()) == names

    torch.manual_seed(0)
    plain = make_model()
    losses = trained(plain, 40), trained(model, 40)
    print(f"mean loss of 40 steps: {losses[0]:.4f} as it came, {losses[1]:.4f} with {len(chosen)} layers in MXFP8")
    assert abs(losses[1] - losses[0]) < 0.05 * losses[0]
    revert(model)
    plain.load_state_dict(model.state_dict())


if __name__ == "__main__":
    main()
