"""A torchrec DLRM that reads a user's history: the padded sequence tower that one would write, and ours beside it.

The DLRM is torchrec's own. Its dense input gets one more vector: the user's clicks, embedded, attended to one another,
pooled. The padded tower pads every user to the longest; the jagged one works on the packed events that the
KeyedJaggedTensor already holds. Same weights, same result, a fraction of the rows.

Letters: B users, T events, L longest history, D width, N heads, H head width, F dense features.
"""

from __future__ import annotations

import torch
from gemworks.jagged import flash_attention, from_torchrec, mean_pool
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

NUM_IDS, D, N, MAX_LENGTH, NUM_DENSE = 1000, 32, 2, 64, 8


class HistoryTower(nn.Module):
    """One layer of attention over each user's history, then its mean: [B, D]. Nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, history: JaggedTensor) -> Tensor:
        events = from_torchrec(history, max_length=MAX_LENGTH)
        q_TNH, k_TNH, v_TNH = self.qkv(events.values).unflatten(-1, (3, N, D // N)).unbind(1)
        mixed_TNH = flash_attention(q_TNH, k_TNH, v_TNH, events.offsets, max_length_q=events.max_length, causal=True)
        rows_TD = events.values + self.out(mixed_TNH.flatten(1))
        return mean_pool(rows_TD, events.offsets)

    def padded(self, history: JaggedTensor) -> Tensor:
        """The same, as it is usually written: [B, L, D] and a mask. Kept to compare with."""
        lengths_B = history.lengths()
        x_BLD = history.to_padded_dense(int(lengths_B.max()))
        real_BL = torch.arange(x_BLD.shape[1]) < lengths_B[:, None]
        q, k, v = self.qkv(x_BLD).unflatten(-1, (3, N, D // N)).permute(2, 0, 3, 1, 4)
        seen = real_BL[:, None, None, :] & torch.ones(x_BLD.shape[1], x_BLD.shape[1]).tril().bool()
        seen = seen | torch.eye(x_BLD.shape[1], dtype=torch.bool)  # softmax of a row without keys would be NaN
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        rows_BLD = (x_BLD + self.out(mixed.transpose(1, 2).flatten(2))) * real_BL[..., None]
        return rows_BLD.sum(1) / lengths_B.clamp(min=1)[:, None]


class DlrmWithHistory(nn.Module):
    """torchrec's DLRM, with the history as further dense features."""

    def __init__(self) -> None:
        super().__init__()
        bags = [
            EmbeddingBagConfig(name=f"t_{f}", embedding_dim=D, num_embeddings=NUM_IDS, feature_names=[f]) for f in "ab"
        ]
        clicks = EmbeddingConfig(name="click_table", embedding_dim=D, num_embeddings=NUM_IDS, feature_names=["history"])
        self.clicks = EmbeddingCollection(tables=[clicks])
        self.tower = HistoryTower()
        self.dlrm = DLRM(EmbeddingBagCollection(tables=bags), NUM_DENSE + D, [64, D], [64, 1])

    def forward(self, dense_BF: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        bags, history = ids.split([2, 1])
        events = self.clicks(history)["history"]
        return self.dlrm(torch.cat([dense_BF, self.tower(events)], dim=1), bags).squeeze(1)


def batch(num_users: int, seed: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Users with 0 to 63 clicks, most with few; whoever ever clicked one of the first quarter of items clicks again."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = (MAX_LENGTH * torch.rand(num_users, generator=generator) ** 4).long()
    history = torch.randint(0, NUM_IDS, (int(lengths_B.sum()),), generator=generator)
    bags = torch.randint(0, NUM_IDS, (2 * num_users,), generator=generator)
    labels = torch.stack([(h < NUM_IDS // 4).float().sum().clamp(max=1) for h in history.split(lengths_B.tolist())])
    ids = KeyedJaggedTensor(
        keys=["a", "b", "history"],
        values=torch.cat([bags, history]),
        lengths=torch.cat([torch.ones(2 * num_users, dtype=torch.long), lengths_B]),
    )
    return torch.randn(num_users, NUM_DENSE, generator=generator), ids, labels


def main() -> None:
    torch.manual_seed(0)
    model = DlrmWithHistory()
    dense, ids, labels = batch(256, seed=0)
    events = model.clicks(ids.split([2, 1])[1])["history"]
    ours, theirs = model.tower(events), model.tower.padded(events)
    same = ((ours - theirs).norm() / theirs.norm()).item()
    lengths = ids["history"].lengths()
    rows, padded_rows = int(lengths.sum()), len(lengths) * int(lengths.max())
    print(f"relative difference of the jagged and the padded tower {same:.1e}; {rows} rows instead of {padded_rows}")
    assert same < 1e-5
    assert int(lengths.min()) == 0, "users without a history are part of the example"

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        dense, ids, labels = batch(256, seed=step)
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < 0.8 * losses[0]


if __name__ == "__main__":
    main()
