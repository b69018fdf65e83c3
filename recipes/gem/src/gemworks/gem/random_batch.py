"""A random batch of any schema and lengths: for benchmarks, memory probes and tests. It holds no signal.

Shapes: B samples, T packed events of one type, C float columns, K tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from gemworks.gem.schema import Batch, Events, Schema
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

DAY_SECONDS = 86400


def random_batch(schema: Schema, lengths: Mapping[str, Sequence[int]], *, seed: int = 0, max_ids: int = 3) -> Batch:
    """A batch on the CPU whose ids, floats, times and labels are random.

    Args:
        schema: of the batch.
        lengths: per event type, one history length per sample.
        seed: the same seed gives the same batch.
        max_ids: ids per sample and feature are uniform on [0, max_ids].

    Raises:
        ValueError: lengths that miss an event type, or differ in their number of samples.
    """
    names = [event.name for event in schema.events]
    sizes = {len(lengths[name]) for name in names if name in lengths}
    if sorted(lengths) != sorted(names) or len(sizes) != 1:
        raise ValueError(f"lengths: got {dict(lengths)}, expected one list per event type of {names}, all equally long")
    num_samples, generator = sizes.pop(), torch.Generator().manual_seed(seed)

    def ids(num_ids: int, num: int) -> Tensor:
        return torch.randint(num_ids, (num,), generator=generator)

    counts = [torch.randint(max_ids + 1, (num_samples,), generator=generator) for _ in schema.ids]
    timestamps_B = 1_600_000_000 + torch.randint(DAY_SECONDS, (num_samples,), generator=generator)
    events: dict[str, Events] = {}
    event_values: list[Tensor] = []
    event_counts: list[Tensor] = []
    for event in schema.events:
        lengths_B = torch.tensor(list(lengths[event.name]), dtype=torch.int64)
        total = int(lengths_B.sum())
        sample_T = torch.repeat_interleave(lengths_B, output_size=total)
        age_T = 1 + (torch.rand(total, generator=generator) ** 3 * 30 * DAY_SECONDS).long()
        order_T = torch.argsort(sample_T * (31 * DAY_SECONDS) - age_T)
        longest = int(lengths_B.max()) if num_samples else 0
        events[event.name] = Events(
            torch.randn(total, len(event.float_names), generator=generator),
            timestamps_B[sample_T] - age_T[order_T],
            torch.cat([torch.zeros(1, dtype=torch.int64), lengths_B.cumsum(0)]),
            1 << max(longest - 1, 0).bit_length(),
        )
        event_values += [ids(f.num_ids, total) for f in event.ids]
        event_counts += [lengths_B for _ in event.ids]
    return Batch(
        ids=_keyed(
            [f.name for f in schema.ids],
            [ids(f.num_ids, int(c.sum())) for f, c in zip(schema.ids, counts, strict=True)],
            counts,
        ),
        event_ids=_keyed(
            [schema.event_key(event.name, f.name) for event in schema.events for f in event.ids],
            event_values,
            event_counts,
        ),
        dense_BC=torch.randn(num_samples, len(schema.dense_names), generator=generator),
        timestamps_B=timestamps_B,
        labels_BK=torch.randint(2, (num_samples, len(schema.tasks)), generator=generator).float(),
        sample_ids_B=torch.arange(num_samples),
        events=events,
    )


def _keyed(keys: list[str], values: list[Tensor], counts: list[Tensor]) -> KeyedJaggedTensor:
    empty = torch.empty(0, dtype=torch.int64)
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([empty, *values]),
        lengths=torch.cat([empty, *counts]),
    )


def select_samples(batch: Batch, schema: Schema, samples: Sequence[int]) -> Batch:
    """The batch that holds only `samples` of a batch, in that order.

    Args:
        batch: on the CPU.
        schema: of the batch.
        samples: indices into the batch; repeats are allowed.
    """
    index = torch.tensor(list(samples), dtype=torch.int64)

    def take(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        parts = [values[int(offsets[i]) : int(offsets[i + 1])] for i in index.tolist()]
        return torch.cat([values[:0], *parts]), offsets.diff()[index]

    def take_keyed(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        taken = [take(jagged.values(), jagged.offsets()) for jagged in ids.to_dict().values()]
        return _keyed(list(ids.keys()), [v for v, _ in taken], [c for _, c in taken])

    events = {}
    for event in schema.events:
        e = batch.events[event.name]
        timestamps_T, lengths_B = take(e.timestamps_T, e.offsets_S)
        offsets_S = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_B.cumsum(0)])
        events[event.name] = Events(take(e.floats_TC, e.offsets_S)[0], timestamps_T, offsets_S, e.max_length)
    return Batch(
        ids=take_keyed(batch.ids),
        event_ids=take_keyed(batch.event_ids),
        dense_BC=batch.dense_BC[index],
        timestamps_B=batch.timestamps_B[index],
        labels_BK=batch.labels_BK[index],
        sample_ids_B=batch.sample_ids_B[index],
        events=events,
    )
