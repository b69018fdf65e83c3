"""GEM `tiny` finds the planted signal: most of the gap between knowing nothing and the Bayes optimum, in seconds."""

import numpy as np
import pytest
import torch
from gemworks.gem.data import Loader, Synthetic, SyntheticSpec
from gemworks.gem.metrics import normalized_entropy
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
    optimizers = Optimizers(model, config.optimizer, NUM_STEPS)
    for step, batch in enumerate(Loader(source, "train", batch_size=64)):
        optimizers.begin(step)
        binary_cross_entropy_with_logits(model(batch), batch.labels_BK).backward()
        optimizers.clip()
        optimizers.step_dense()
    rows = np.arange(min(NUM_EVAL, source.num_samples("test")), dtype=np.int64)
    batch = source.read("test", rows)
    with torch.no_grad():
        ne = normalized_entropy(model(batch)[:, 0], batch.labels_BK[:, 0])
    bayes = source.bayes_ne("test", num_samples=len(rows))["click"]
    assert (1 - ne) / (1 - bayes) >= 0.8
