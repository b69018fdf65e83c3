"""The FLOP counter against torch, against brute force, and against the table of the model's description."""

import pytest
import torch
from gemworks.gem.config import EventConfig, GemConfig
from gemworks.gem.efficiency import (
    H200_BF16_PEAK_FLOPS,
    H200_FP8_PEAK_FLOPS,
    LengthHistogram,
    count_batch_flops,
    count_expected_flops,
    count_flops,
    mfu,
    mixed_peak,
)
from gemworks.gem.flop_costs import PairRule, part_costs
from gemworks.gem.model import Gem
from gemworks.gem.model.attention import SelfAttention
from gemworks.gem.presets import get_preset
from gemworks.gem.random_batch import random_batch
from gemworks.gem.schema import EventType, IdFeature, Schema
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.reference

ITEM = IdFeature(name="item", num_ids=40, table="item")
SCHEMA = Schema(
    ids=(IdFeature(name="user", num_ids=50, table="user"), ITEM),
    dense_names=("age", "count", "rate"),
    events=(
        EventType(name="click", ids=(ITEM,), float_names=("price",)),
        EventType(name="view", ids=(ITEM,)),
    ),
    tasks=("click", "buy"),
)
ONE_EVENT = Schema(ids=SCHEMA.ids, dense_names=SCHEMA.dense_names, events=SCHEMA.events[:1], tasks=("click",))
VARIANTS: dict[str, dict] = {
    "block": {},
    "full": {"attention": "full"},
    "window_wider_than_all": {"attention": "window", "window": 128},
    "gdpa_pooling": {"pooling": "gdpa"},
    "skip": {"skip": "alternate", "num_layers": 3},
    "no_reuse": {"reuse_hsp": False},
    "many_summaries": {"num_summary_tokens": 24, "expert_layers": 2, "num_experts": 3},
    "event_sizes": {"events": {"click": EventConfig(dim=32, num_heads=1, num_seeds=4, num_layers=1, attention="full")}},
}


def tiny(**model: object) -> GemConfig:
    return get_preset("tiny").with_model(**model)


def executed_flops(config: GemConfig, lengths: dict[str, list[int]], *, backward: bool = False) -> int:
    torch.manual_seed(0)
    model, batch = Gem(SCHEMA, config), random_batch(SCHEMA, lengths)
    with FlopCounterMode(display=False) as counter:
        logits = model(batch)
        if backward:
            logits.sum().backward()
    # torch counts an attention backward as five products, the recomputed logits among them; MFU counts four.
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    recomputed = sum(n for op, n in counts.items() if "attention" in op and "backward" in op) // 5
    return counter.get_total_flops() - recomputed


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_agrees_with_torch_on_full_lengths(variant: str):
    """Equal, so certainly within 1 %: on full blocks nothing is padded, and what is executed is what is counted."""
    config = tiny(**VARIANTS[variant])
    lengths = {"click": [128] * 4, "view": [64] * 4}
    counted = count_flops(config, SCHEMA, lengths)
    assert counted.forward == pytest.approx(executed_flops(config, lengths), rel=1e-9)


@pytest.mark.parametrize("variant", ["block", "full", "no_reuse"])
def test_backward_is_twice_the_forward(variant: str):
    """Within 0.01 %: torch skips only the gradient of the dense columns, which are inputs."""
    config = tiny(**VARIANTS[variant])
    lengths = {"click": [128] * 4, "view": [64] * 4}
    counted = count_flops(config, SCHEMA, lengths)
    assert counted.training == 3 * counted.forward
    assert counted.training == pytest.approx(executed_flops(config, lengths, backward=True), rel=1e-4)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(*[st.sampled_from([0, 1, 7, 63, 64, 65, 130])] * 2), min_size=1, max_size=5),
    kind=st.sampled_from(["block", "full", "window"]),
)
def test_l3_never_more_than_was_executed(lengths: list[tuple[int, int]], kind: str):
    """L3: MFU cannot exceed 100 %, as the counted FLOPs never exceed the executed ones, whatever is padded."""
    config = tiny(attention=kind, window=5)
    by_event = {"click": [a for a, _ in lengths], "view": [b for _, b in lengths]}
    counted = count_flops(config, SCHEMA, by_event).forward
    executed = executed_flops(config, by_event)
    assert counted <= executed * (1 + 1e-9)
    seconds = executed / H200_BF16_PEAK_FLOPS  # a machine that runs at peak all the time
    assert 0 < mfu(counted, seconds) <= 1 + 1e-9


def test_l3_padding_is_not_counted():
    """L3: a sample of one event beside one of 1024 adds its own FLOPs only."""
    config = tiny(attention="full")
    together = count_flops(config, SCHEMA, {"click": [1024, 1], "view": [0, 0]}).forward
    apart = sum(count_flops(config, SCHEMA, {"click": [n], "view": [0]}).forward for n in (1024, 1))
    padded = count_flops(config, SCHEMA, {"click": [1024, 1024], "view": [0, 0]}).forward
    assert together == pytest.approx(apart)
    assert together < 0.6 * padded


def brute_force_pairs(rule: PairRule, length: int) -> int:
    def admitted(i: int, j: int) -> bool:
        if rule.kind == "block":
            return i // rule.block == j // rule.block
        return rule.kind == "full" or abs(i - j) <= rule.window

    return sum(admitted(i, j) for i in range(length) for j in range(length))


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 100),
    kind=st.sampled_from(["block", "full", "window"]),
    block=st.sampled_from([32, 64]),
    window=st.integers(1, 120),
)
def test_admitted_pairs_agree_with_brute_force(length: int, kind, block: int, window: int):
    rule = PairRule(kind=kind, block=block, window=window)
    assert rule.pairs(length) == brute_force_pairs(rule, length)


def test_jagged_batch_agrees_with_brute_force():
    """Attention's core on a jagged batch: 4 D per admitted pair, exactly."""
    lengths = {"click": [0, 1, 63, 64, 65, 130], "view": [5, 0, 0, 100, 1, 2]}
    for kind in ("block", "window", "full"):
        config = tiny(attention=kind, window=9, num_layers=1)
        count = count_batch_flops(config, SCHEMA, random_batch(SCHEMA, lengths))
        rule = PairRule(kind=kind, block=64, window=9)
        for event, values in lengths.items():
            pairs = sum(brute_force_pairs(rule, n) for n in values)
            assert count.parts[f"layer0.{event}.attention.core"] == 4 * 64 * pairs
            assert count.parts[f"layer0.{event}.attention.projections"] == 8 * 64**2 * sum(values)


def test_window_of_the_model_is_the_window_that_is_counted():
    """The model's attention reaches exactly `window` keys to each side: a change further away leaves a token alone."""
    config = get_preset("tiny").with_data(num_event_types=1, source="parquet")
    config = config.with_model(attention="window", window=3, num_layers=1, num_event_types=1)
    torch.manual_seed(0)
    model, batch = Gem(ONE_EVENT, config), random_batch(ONE_EVENT, {"click": [20]})
    tokens = model.events[0]
    attention = next(m for m in model.modules() if isinstance(m, SelfAttention))
    rows = model.embeddings(batch)[1]["click/item"]
    sequence = tokens([rows], batch.events["click"], batch.timestamps_B)
    s_TD = sequence.s_TD.detach().requires_grad_()
    attention(sequence.replace_tokens(s_TD))[10].sum().backward()
    assert s_TD.grad is not None
    assert torch.nonzero(s_TD.grad.abs().sum(1)).flatten().tolist() == list(range(7, 14))


def test_table_of_the_model_description():
    """The formulas of the published table, written out for `large` with one sample of T events."""
    config, T, D = get_preset("large"), 1000, 512
    parts = count_flops(config, ONE_EVENT, {"click": [T]}).parts
    assert parts["layer0.click.attention.projections"] == 8 * T * D**2
    assert parts["layer0.click.pffn.core"] == 4 * T * 256 * D
    assert parts["layer0.click.attention.core"] == 4 * D * (15 * 64 * 64 + 40 * 40)
    assert parts["layer0.click.hsp.core"] == 4 * 256 * T * D
    assert parts["layer0.click.hsp.projections"] == 4 * T * D**2
    assert parts["layer0.click.hsp.kronecker"] == 8 * (2 * 256 * 32 * D + 2 * 32 * D**2)
    # n_sum = 32 < K = 256: the D x D linear goes over 32 rows, the cheaper association, and not over 256.
    assert parts["layer0.click.pffn.weights"] == 2 * (2 * 256 * 32 * D + 2 * 32 * D**2)
    n, k = 64, 16
    mlp = 2 * (n * k * 1024 + 1024 * 32 * D)
    assert parts["layer1.experts"] == 4 * (4 * n * k * D + mlp + 2 * 32 * n * D)


@pytest.mark.parametrize("law", ["uniform", "uniform_0.7", "zipf"])
def test_dense_part_of_large_is_at_most_a_fifth(law):
    """A wide MLP must not buy MFU. The heavy-tailed law, whose mean is short, is the hardest and is reported only."""
    config = get_preset("large").with_data(length_law=law)
    schema = Schema(
        ids=tuple(IdFeature(name=f"f{i}", num_ids=10, table=f"t{i}") for i in range(32)),
        dense_names=tuple(f"d{i}" for i in range(64)),
        events=(EventType(name="click", ids=(ITEM, ITEM, ITEM), float_names=("price",)),),
        tasks=("click",),
    )
    count = count_expected_flops(config, schema)
    share = count.dense / count.forward
    assert count.dense + count.sequence == pytest.approx(count.forward)
    assert share > 0.01
    if law != "zipf":
        assert share <= 0.20, share


def test_histogram_list_tensor_law_and_batch_agree():
    config, lengths = tiny(), {"click": [1, 2, 3, 4], "view": [4, 3, 2, 1]}
    expected = count_flops(config, SCHEMA, lengths).parts
    as_tensors = {name: torch.tensor(values) for name, values in lengths.items()}
    law = LengthHistogram.of_law("uniform", 4, 4)
    for same in (as_tensors, {"click": law, "view": law}):
        assert count_flops(config, SCHEMA, same).parts == pytest.approx(expected)
    assert count_batch_flops(config, SCHEMA, random_batch(SCHEMA, lengths)).parts == pytest.approx(expected)
    config = config.with_data(max_length=4, batch_size=4)
    assert count_expected_flops(config, SCHEMA).parts == pytest.approx(expected)


@pytest.mark.parametrize(("law", "ratio"), [("uniform", 0.5), ("uniform_0.7", 0.7)])
def test_laws_have_their_mean(law, ratio: float):
    histogram = LengthHistogram.of_law(law, 2048, 10)
    assert histogram.num_samples == pytest.approx(10)
    assert histogram.num_tokens / 10 / 2048 == pytest.approx(ratio, rel=0.01)


def test_parts_by_kind_lose_nothing():
    count = count_flops(tiny(), SCHEMA, {"click": [10, 3], "view": [1, 0]})
    kinds = count.by_kind()
    assert sum(kinds.values()) == pytest.approx(count.forward)
    assert set(kinds) >= {
        "attention.core",
        "attention.projections",
        "pffn.core",
        "hsp.core",
        "experts",
        "merge",
        "head",
    }
    names = [cost.name for cost in part_costs(tiny(), SCHEMA)]
    assert len(names) == len(set(names)) == len(count.parts)


def test_empty_batches_cost_nothing():
    assert count_flops(tiny(), SCHEMA, {"click": [], "view": []}).forward == 0
    only_dense = count_flops(tiny(), SCHEMA, {"click": [0, 0], "view": [0, 0]})
    assert only_dense.sequence == 0
    assert only_dense.dense > 0


def test_mfu_and_peaks():
    assert mfu(2 * 989e12, 1.0, num_gpus=4) == 0.5
    assert mixed_peak(1.0, 1.0) == pytest.approx(2 / (1 / H200_BF16_PEAK_FLOPS + 1 / H200_FP8_PEAK_FLOPS))
    assert mixed_peak(0.0, 3.0) == pytest.approx(H200_FP8_PEAK_FLOPS)


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match=r"lengths: got event types \['click'\], expected \['click', 'view'\]"):
        count_flops(tiny(), SCHEMA, {"click": [1]})
    with pytest.raises(ValueError, match=r"lengths\['view'\]: got 2 samples, expected 1"):
        count_flops(tiny(), SCHEMA, {"click": [1], "view": [1, 2]})
    with pytest.raises(ValueError, match="lengths: got -1, expected 0 or more"):
        count_flops(tiny(), SCHEMA, {"click": [-1], "view": [1]})
    with pytest.raises(ValueError, match="law: got 'normal', expected one of uniform"):
        LengthHistogram.of_law("normal", 4, 4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="seconds: got 0, expected a positive number"):
        mfu(1.0, 0)
    with pytest.raises(ValueError, match="not both 0"):
        mixed_peak(0.0, 0.0)
    no_events = Schema(ids=SCHEMA.ids, dense_names=(), events=(), tasks=("click",))
    with pytest.raises(ValueError, match="num_samples: missing"):
        count_flops(tiny(), no_events, {})
