"""A small training and a stash for it, as several tests of the stash need them."""

from __future__ import annotations

import torch
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.movers import DelayedMover
from gemworks.netmem.stash import StateStash
from torch import nn


def make_stash(seed: int = 0, capacity_bytes: int = 1 << 20) -> StateStash:
    mover = DelayedMover(seed, max_delay=20, chunk_bytes=256)
    return StateStash(PinnedArena(capacity_bytes, pin=False), device="cpu", min_bytes=64, mover=mover)


def make_training(seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model, optimizer, steps, before=lambda: None):
    losses = []
    for step in range(steps):
        ids = torch.randint(0, 50, (12, 4), generator=torch.Generator().manual_seed(step))
        before()
        loss = model(ids).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
