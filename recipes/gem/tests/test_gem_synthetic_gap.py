"""GEM `tiny` finds the planted signal: most of the gap between knowing nothing and the Bayes optimum, in seconds."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gemworks.gem.data import Loader, Synthetic, SyntheticSpec
from gemworks.gem.model.gem import Gem
from gemworks.gem.optim import Optimizers
from gemworks.gem.presets import get_preset
from torch.nn.functional import binary_cross_entropy_with_logits

pytestmark = pytest.mark.reference
NUM_STEPS = 120
NUM_EVAL = 1024


def test_tiny_closes_most_of_the_gap_to_bayes():
    torch.manual_seed(0)
    source = Synthetic(SyntheticSpec(num_samples=64 * NUM_STEPS, max_length=64))
    config = get_preset("tiny")
    model = Gem(source.schema, config)
    settings = replace(config.optimizer, lr=3e-3, sparse_lr=3e-2, warmup_steps=20, decay="constant")
    optimizers = Optimizers(model, settings, NUM_STEPS)
    for step, batch in enumerate(Loader(source, "train", batch_size=64)):
        optimizers.zero_grad()
        binary_cross_entropy_with_logits(model(batch), batch.labels_BK).backward()
        optimizers.step(step)
    rows = np.arange(min(NUM_EVAL, source.num_samples("test")), dtype=np.int64)
    batch = source.read("test", rows)
    with torch.no_grad():
        loss_K = binary_cross_entropy_with_logits(model(batch), batch.labels_BK, reduction="none").mean(dim=0)
    ne = float(loss_K[0]) / np.log(2)
    bayes = source.bayes_ne("test", num_samples=len(rows))["click"]
    assert (1 - ne) / (1 - bayes) >= 0.8
