"""What must hold for the whole model: gradients, independence of samples, empty inputs, determinism, bf16."""

import dataclasses
import math

import pytest
import torch
from gemworks.gem.config import Activation, EventConfig, GemConfig
from gemworks.gem.model import Gem
from gemworks.gem.model.events import EventTokens
from gemworks.gem.plan import LayerParts, layer_parts
from gemworks.gem.presets import PRESETS, get_preset
from gemworks.gem.random_batch import random_batch, select_samples
from gemworks.gem.schema import Batch, EventType, IdFeature, Schema
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

pytestmark = pytest.mark.reference

USER = IdFeature(name="user", num_ids=50, table="user")
ITEM = IdFeature(name="item", num_ids=40, table="item")
TAGS = IdFeature(name="tags", num_ids=9, table="tag")
TAG = IdFeature(name="tag", num_ids=9, table="tag")
SCHEMA = Schema(
    ids=(USER, ITEM, TAGS, IdFeature(name="country", num_ids=5, table="country")),
    dense_names=("age", "count", "rate"),
    events=(
        EventType(name="click", ids=(ITEM, TAG), float_names=("price",)),
        EventType(name="view", ids=(ITEM,)),
    ),
    tasks=("click", "buy"),
)
LENGTHS = {"click": [0, 1, 70, 33, 64, 128, 5, 0], "view": [3, 65, 0, 100, 1, 0, 31, 0]}

VARIANTS: dict[str, dict] = {
    "default": {},
    "window": {"attention": "window", "window": 3},
    "full": {"attention": "full"},
    "gdpa_pooling": {"pooling": "gdpa"},
    "skip": {"skip": "alternate", "num_layers": 3},
    "no_reuse": {"reuse_hsp": False},
    "buckets": {"time_encoding": "buckets"},
    "buckets_full_skip": {"time_encoding": "buckets", "attention": "full", "skip": "alternate", "num_layers": 3},
    "position_only": {"time_fraction": 0.0},
    "scale": {"pffn_scale": "max_length", "pffn_activation": "silu"},
    "deep_experts": {"expert_layers": 2, "num_experts": 3, "num_fmb_tokens": 3},
    "wide_summary": {"num_summary_tokens": 24},
    "event_sizes": {
        "num_layers": 3,
        "events": {
            "click": EventConfig(dim=32, num_heads=1, num_seeds=4, num_sequence_tokens=2, num_layers=2),
            "view": EventConfig(attention="window", window=5, num_layers=1),
        },
    },
    "wide_event": {"events": {"view": EventConfig(dim=128, num_heads=2, attention="full")}},
}


def tiny(**model: object) -> GemConfig:
    config = get_preset("tiny")
    return dataclasses.replace(config.with_data(source="parquet"), model=dataclasses.replace(config.model, **model))


def build(config: GemConfig, schema: Schema = SCHEMA, seed: int = 0) -> Gem:
    torch.manual_seed(seed)
    return Gem(schema, config)


def loss_of(model: Gem, batch: Batch) -> torch.Tensor:
    return binary_cross_entropy_with_logits(model(batch), batch.labels_BK)


def missing_gradients(model: Gem) -> list[str]:
    def missing(p: torch.nn.Parameter) -> bool:
        return p.grad is None or not bool(torch.isfinite(p.grad).all()) or float(p.grad.abs().max()) == 0.0

    return [name for name, p in model.named_parameters() if missing(p)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant: str):
    model = build(tiny(**VARIANTS[variant]))
    batch = random_batch(SCHEMA, LENGTHS)
    logits = model(batch)
    assert logits.shape == (8, 2)
    assert logits.dtype == torch.float32
    loss_of(model, batch).backward()
    assert missing_gradients(model) == []


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_presets_get_gradients_everywhere(preset: str):
    config = get_preset(preset)
    names = list(config.model.events) or ["click", "view"]
    events = tuple(dataclasses.replace(e, name=n) for e, n in zip(SCHEMA.events, names, strict=True))
    schema = dataclasses.replace(SCHEMA, events=events)
    model = build(config, schema)
    loss_of(model, random_batch(schema, dict(zip(names, LENGTHS.values(), strict=True)))).backward()
    assert missing_gradients(model) == []


@pytest.mark.parametrize("activation", [a for a in Activation.__args__ if a not in ("relu", "squared_relu")])
def test_every_activation_of_the_pffn(activation: str):
    model = build(tiny(num_layers=1, pffn_activation=activation))
    loss_of(model, random_batch(SCHEMA, LENGTHS)).backward()
    assert missing_gradients(model) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sample_does_not_depend_on_its_neighbours(variant: str):
    """One sample alone, and samples in another order, give the logits they had in the batch."""
    model = build(tiny(**VARIANTS[variant])).eval()
    batch = random_batch(SCHEMA, LENGTHS)
    with torch.no_grad():
        together = model(batch)
        order = [3, 7, 0, 5, 1, 2, 6, 4]
        permuted = model(select_samples(batch, SCHEMA, order))
        torch.testing.assert_close(permuted, together[order], rtol=1e-4, atol=1e-5)
        for i in (0, 2, 5, 7):
            alone = model(select_samples(batch, SCHEMA, [i]))
            torch.testing.assert_close(alone, together[i : i + 1], rtol=1e-4, atol=1e-5)


def test_samples_differ():
    """The independence test could not fail on a model that ignores its input."""
    model = build(tiny()).eval()
    batch = random_batch(SCHEMA, LENGTHS)
    with torch.no_grad():
        logits = model(batch)
    assert float((logits[:, None] - logits[None]).abs().amax(-1)[~torch.eye(8, dtype=torch.bool)].min()) > 1e-3


@pytest.mark.parametrize("variant", ["default", "full", "window", "gdpa_pooling", "buckets", "skip"])
def test_all_empty_sequences(variant: str):
    """Samples without any event, a whole batch of them, train and give finite logits."""
    model = build(tiny(**VARIANTS[variant]))
    batch = random_batch(SCHEMA, {"click": [0, 0, 0], "view": [0, 0, 0]})
    loss = loss_of(model, batch)
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    mixed = random_batch(SCHEMA, {"click": [0, 4, 0], "view": [0, 0, 2]}, seed=1)
    with torch.no_grad():
        alone = model(select_samples(mixed, SCHEMA, [0]))
        torch.testing.assert_close(alone, model(mixed)[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["default", "full", "gdpa_pooling", "buckets", "skip"])
def test_empty_batch(variant: str):
    """B = 0: logits [0, K], and a backward pass that changes nothing."""
    model = build(tiny(**VARIANTS[variant]))
    logits = model(random_batch(SCHEMA, {"click": [], "view": []}))
    assert logits.shape == (0, 2)
    logits.sum().backward()
    assert all(p.grad is None or float(p.grad.abs().max()) == 0.0 for p in model.parameters())


@pytest.mark.parametrize("num_samples", [0, 2])
def test_a_small_batch_reaches_the_collections_filled_up_and_nobody_sees_it(num_samples: int):
    """What is put into `rows` and `bags` from outside may want batches of one size (case M2 with sharded tables)."""
    embeddings = build(tiny()).embeddings
    assert embeddings.rows is not None
    assert embeddings.bags is not None
    batch = random_batch(SCHEMA, {"click": [3, 0][:num_samples], "view": [1, 2][:num_samples]})
    expected_BnW, expected_rows = embeddings(batch)
    sizes: list[int] = []
    for name in ("rows", "bags"):
        getattr(embeddings, name).register_forward_pre_hook(lambda _, args: sizes.append(args[0].stride()))
    embeddings.min_samples = 5
    sample_BnW, rows = embeddings(batch)
    assert sizes == [5, 5]
    assert sample_BnW.shape == (num_samples, 4, embeddings.dim)
    assert torch.equal(sample_BnW, expected_BnW)
    assert all(torch.equal(rows[key], expected_rows[key]) for key in expected_rows)


@pytest.mark.parametrize("variant", ["default", "event_sizes"])
def test_deterministic(variant: str):
    """The same seed and batch: bit-equal logits and gradients, in two models and in two passes of one."""
    batch = random_batch(SCHEMA, LENGTHS)
    runs = []
    for _ in range(2):
        model = build(tiny(**VARIANTS[variant]))
        loss_of(model, batch).backward()
        runs.append([p.grad for p in model.parameters()])
        assert torch.equal(model(batch), model(batch))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("variant", ["default", "window", "gdpa_pooling", "event_sizes"])
def test_bf16_autocast(variant: str):
    model = build(tiny(**VARIANTS[variant]))
    batch = random_batch(SCHEMA, LENGTHS)
    exact = model(batch).detach()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, batch)
        rounded = model(batch).detach()
    loss.backward()
    assert missing_gradients(model) == []
    assert rounded.dtype == torch.float32
    assert float((rounded - exact).abs().max()) < 0.05
    assert float((rounded - exact).abs().max()) > 0.0


def test_order_and_time_matter():
    """Swapping two events, or moving one in time, changes the logits."""
    schema = dataclasses.replace(SCHEMA, ids=(), dense_names=(), events=SCHEMA.events[1:])
    for encoding in ("rotary", "buckets"):
        model = build(tiny(num_event_types=1, time_encoding=encoding), schema).eval()
        batch = random_batch(schema, {"view": [6]})
        with torch.no_grad():
            before = model(batch)
            keys, lengths = batch.event_ids.keys(), batch.event_ids.lengths()
            values = batch.event_ids.values().clone()
            values[[0, 3]] = torch.tensor([1, 2])
            swapped = values.clone()
            swapped[[0, 3]] = torch.tensor([2, 1])
            one, two = (
                model(dataclasses.replace(batch, event_ids=KeyedJaggedTensor(keys, v, lengths=lengths)))
                for v in (values, swapped)
            )
            assert float((one - two).abs().max()) > 1e-5
            batch.events["view"].timestamps_T[0] -= 20 * 86400
            assert float((model(batch) - before).abs().max()) > 1e-5


@pytest.mark.parametrize("part", ["no_ids", "no_dense", "nothing", "bare_events", "no_shared_table"])
def test_schemas_without_some_parts(part: str):
    bare = tuple(EventType(name=n, ids=()) for n in ("click", "view"))
    schema = {
        "no_ids": dataclasses.replace(SCHEMA, ids=()),
        "no_dense": dataclasses.replace(SCHEMA, dense_names=()),
        "nothing": dataclasses.replace(SCHEMA, ids=(), dense_names=(), events=bare),
        "bare_events": dataclasses.replace(SCHEMA, events=bare),
        "no_shared_table": dataclasses.replace(SCHEMA, ids=(USER,)),
    }[part]
    model = build(tiny(), schema)
    batch = random_batch(schema, LENGTHS)
    loss_of(model, batch).backward()
    missing = missing_gradients(model)
    assert missing == []


def test_sample_and_history_share_rows():
    """Features that name one table have one weight, and the sparse part holds exactly the tables."""
    model = build(tiny())
    names = sorted(name for name, _ in model.embeddings.named_parameters())
    assert len(names) == 4
    assert {id(p) for p in model.sparse_parameters()} == {id(p) for p in model.embeddings.parameters()}
    dense, sparse = list(model.dense_parameters()), list(model.sparse_parameters())
    assert len(dense) + len(sparse) == len(list(model.parameters()))
    assert not {id(p) for p in dense} & {id(p) for p in sparse}
    batch = random_batch(SCHEMA, LENGTHS)
    embeddings_BnW, rows = model.embeddings(batch)
    weight = next(p for n, p in model.embeddings.named_parameters() if ".item." in n)
    assert torch.equal(rows["click/item"], weight[batch.event_ids["click/item"].values()])
    own = batch.ids["item"]
    for i, ids in enumerate(own.values().split(own.lengths().tolist())):
        expected = weight[ids].mean(0) if len(ids) else torch.zeros(16)
        torch.testing.assert_close(embeddings_BnW[i, 1], expected)
    user = batch.ids["user"]
    weight = next(p for n, p in model.embeddings.named_parameters() if ".user." in n)
    for i, ids in enumerate(user.values().split(user.lengths().tolist())):
        expected = weight[ids].mean(0) if len(ids) else torch.zeros(16)
        torch.testing.assert_close(embeddings_BnW[i, 0], expected)


def test_streams_start_at_unit_scale():
    """In a fresh model tokens and summaries have an RMS near 1 and logits are near 0.

    The PFFN adds a vector of RMS 1, mostly along its input, so a sequence grows by about 1 with each layer; all that
    reads it normalises first.
    """
    config = get_preset("small").with_model(num_layers=6, events={}, skip="none")
    model = build(config).eval()
    scales: dict[str, float] = {}

    def record(name: str):
        def hook(_module, _inputs, output) -> None:
            x_BnD, sequences, pooled = output
            tensors = {
                "x": x_BnD,
                **{f"s{i}": s.s_TD for i, s in enumerate(sequences)},
                "h": torch.cat(pooled, dim=1)[2:4],
            }
            scales.update({f"{name}.{key}": float(t.square().mean().sqrt()) for key, t in tensors.items()})

        return hook

    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(record(f"layer{i}"))
    with torch.no_grad():
        logits = model(random_batch(SCHEMA, LENGTHS))
    for name, scale in scales.items():
        layer = int(name[len("layer")])
        assert 0.5 < scale < (2.5 + layer if ".s" in name else 1.6), scales
    assert float(logits.abs().max()) < 0.7


def test_dropout_acts_in_training_only():
    batch = random_batch(SCHEMA, LENGTHS)
    model = build(tiny(dropout=0.3))
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_layers_alternate_as_published():
    """Kunlun's pairs: PFFN with fresh pooling, then attention with cached pooling; nothing past a type's depth."""
    config = tiny(skip="alternate", num_layers=4, events={"view": EventConfig(num_layers=2)})
    deep, shallow = config.model.event("click"), config.model.event("view")
    first, second = LayerParts(True, True, False), LayerParts(False, False, True)
    assert [layer_parts(config, deep, i) for i in range(4)] == [first, second, first, second]
    assert [layer_parts(config, shallow, i) for i in range(4)] == [
        first,
        second,
        *[LayerParts(False, False, False)] * 2,
    ]
    whole = tiny(reuse_hsp=False)
    assert layer_parts(whole, whole.model.event("click"), 1) == LayerParts(True, True, True)


def test_seeds_are_normed():
    """Their length says nothing: pooled attention would otherwise become as sharp as training drives them."""
    config = tiny(num_layers=1)
    model, batch = Gem(SCHEMA, config), random_batch(SCHEMA, LENGTHS)
    before = model(batch)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "seeds" in name:
                parameter.mul_(7.0)
    torch.testing.assert_close(model(batch), before, rtol=1e-4, atol=1e-5)


def test_positions_are_counted_from_the_newest_event():
    """So that the newest event of every sample has the same row of the table, whatever the length."""
    config = tiny(time_encoding="buckets")
    model, batch = Gem(SCHEMA, config), random_batch(SCHEMA, LENGTHS)
    seen: list[torch.Tensor] = []
    for tokens in model.events:
        assert isinstance(tokens, EventTokens)
        assert tokens.buckets is not None
        tokens.buckets.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(batch)
    assert [x.tolist() for x in seen] == [
        [place for length in lengths for place in reversed(range(length))] for lengths in LENGTHS.values()
    ]


def test_meta_device_creates_nothing():
    """Even the planner's preset can be laid out without memory."""
    config = get_preset("frontier")
    events = tuple(EventType(name=f"e{i}", ids=(ITEM,)) for i in range(10))
    model = Gem(dataclasses.replace(SCHEMA, events=events), config, device="meta")
    assert all(p.device.type == "meta" for p in model.parameters())
    assert sum(p.numel() for p in model.dense_parameters()) > 1e9


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_model(preset: str):
    config = get_preset(preset)
    names = list(config.model.events) or [f"e{i}" for i in range(config.model.num_event_types)]
    events = tuple(EventType(name=n, ids=(ITEM,)) for n in names)
    Gem(dataclasses.replace(SCHEMA, events=events), config, device="meta")


def test_wrong_schemas_are_named():
    with pytest.raises(
        ValueError, match=r"model.events: got 'liked', expected event types of the data: .'click', 'view'"
    ):
        Gem(SCHEMA, get_preset("small").with_model(events={"liked": EventConfig(dim=64)}))
    with pytest.raises(ValueError, match=r"model.num_event_types: got 2, but the data has 1 event types .*; set"):
        Gem(dataclasses.replace(SCHEMA, events=SCHEMA.events[:1]), tiny())
    with pytest.raises(ValueError, match="at least one binary label"):
        Gem(dataclasses.replace(SCHEMA, tasks=()), tiny())
    other = IdFeature(name="item2", num_ids=41, table="item")
    with pytest.raises(ValueError, match="feature 'item2' says table 'item' has 41 ids, another feature says 40"):
        Gem(dataclasses.replace(SCHEMA, ids=(ITEM, other)), tiny())
    with pytest.raises(ValueError, match=r"model.num_fmb_tokens: got 16, expected 1..15"):
        Gem(SCHEMA, tiny(num_fmb_tokens=16))
