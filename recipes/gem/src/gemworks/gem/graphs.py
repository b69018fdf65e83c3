"""Forward and backward of the dense part as CUDA graphs: one launch by the host for a whole step's kernels.

A graph replays the kernels of one shape, and packed batches have as many shapes as totals of events. So every batch is
padded to a bucket of totals: its last rows belong to a few samples more, which have no ids and which no loss sees. A
bucket's graph is captured when a batch falls into it and replayed from then on; lengths lie in device memory
and may differ. The tables stay outside: their rows are copied in, and the gradients of the rows are handed back.

Letters: B samples of a batch, P = B and those that pad, T packed events, C float columns, W embedding width, K tasks.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gemworks.gem.config import GemConfig
from gemworks.gem.device import autocast
from gemworks.gem.schema import Batch, Events, Schema
from torch import Tensor

if TYPE_CHECKING:
    from gemworks.gem.model.gem import Gem

BUCKETS = 64  # over the largest total, of all event types together: an average batch has 1.6 % of padding
SAMPLES_MULTIPLE = 8  # rows of the dense products come in this multiple, as tensor cores like them
MAX_GRAPHS = 24

Key = tuple[int, ...]
LossOf = Callable[[Tensor, Tensor], Tensor]


def bucket_rows(config: GemConfig) -> int:
    """Rows between two buckets of one event type: a power of two, a 1 / 64 of the most that a batch can have.

    With several event types there is a graph per combination, so buckets are coarser.

    >>> from gemworks.gem.presets import get_preset
    >>> bucket_rows(get_preset("large").with_data(batch_size=256))
    8192
    """
    most = config.data.batch_size * config.data.max_length
    return 1 << (max(most * config.model.num_event_types // BUCKETS, 1) - 1).bit_length()


def num_padding_samples(config: GemConfig) -> int:
    """Samples that hold the rows of the padding, whose histories are no longer than others'.

    >>> from gemworks.gem.presets import get_preset
    >>> num_padding_samples(get_preset("large").with_data(batch_size=256))
    8
    """
    needed = -(-bucket_rows(config) // config.data.max_length)
    return -(-needed // SAMPLES_MULTIPLE) * SAMPLES_MULTIPLE


def bytes_per_graph(config: GemConfig, model: Gem, rows: int) -> int:
    """What one graph of a bucket keeps besides its pool: float32 gradients of the dense parameters; rows of the tables,
    and their gradients.

    >>> from gemworks.gem.model.gem import Gem
    >>> from gemworks.gem.data import open_source
    >>> from gemworks.gem.presets import get_preset
    >>> config = get_preset("large").with_data(batch_size=512)
    >>> model = Gem(open_source(config.data).schema, config, device="meta")
    >>> round(bytes_per_graph(config, model, 32 * bucket_rows(config)) / 2**30, 2)
    3.28
    """
    gradients = sum(p.numel() for p in model.dense_parameters() if p.requires_grad)
    num_features = sum(len(event.ids) for event in model.schema.events)
    return 4 * (gradients + 2 * rows * num_features * config.model.embedding_dim)


@dataclass(frozen=True)
class _Inputs:
    """Where a bucket's graph reads: tensors of one address. `batch` has no ids, P samples, and a bucket's rows."""

    embeddings_PnW: Tensor
    event_rows: dict[str, Tensor]
    batch: Batch
    labels_BK: Tensor
    share: Tensor

    def leaves(self) -> Iterator[Tensor]:
        yield self.embeddings_PnW
        yield from self.event_rows.values()


@dataclass(frozen=True)
class _Outputs:
    """Where it writes: logits, the loss, and the gradients of the inputs' leaves and of the dense parameters."""

    logits_BK: Tensor
    loss: Tensor
    leaf_grads: tuple[Tensor | None, ...]
    parameter_grads: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class _Room:
    """Rows of events that inputs are cut from: of a bucket, or for several types as many as any batch has had of each.

    A room for one bucket of the largest sum would not do: of (16, 17) and (17, 16) rows neither holds the other.
    """

    key: Key
    floats: dict[str, Tensor]
    timestamps: dict[str, Tensor]
    rows: dict[str, Tensor]

    @classmethod
    def make(cls, key: Key, batch: Batch, schema: Schema, width: int, device: torch.device) -> _Room:
        floats, timestamps, rows = {}, {}, {}
        for event, total in zip(schema.events, key, strict=True):
            given = batch.events[event.name]
            floats[event.name] = given.floats_TC.new_zeros(total, given.floats_TC.shape[1])
            timestamps[event.name] = given.timestamps_T.new_zeros(total)
            for feature in event.ids:
                rows[schema.event_key(event.name, feature.name)] = torch.zeros(total, width, device=device)
        return cls(key, floats, timestamps, rows)

    def holds(self, key: Key) -> bool:
        return all(total <= most for total, most in zip(key, self.key, strict=True))


@dataclass
class _Bucket:
    inputs: _Inputs
    graph: torch.cuda.CUDAGraph | None = None
    outputs: _Outputs | None = None


class GraphedStep:
    """A model's loss and gradients by graphs.

    Args:
        model: on one device, in one process; its parameters keep their places in memory from here on.
        config: of the run.
        loss_of: of logits and labels, a scalar.
        device: of the model. On a CPU batches are padded, and nothing is captured.

    Attributes:
        num_samples: B; another batch is not taken.
    """

    def __init__(self, model: Gem, config: GemConfig, loss_of: LossOf, device: torch.device) -> None:
        self.model, self.config, self.loss_of, self.device = model, config, loss_of, device
        self.num_samples = config.data.batch_size
        self.rows, self.num_padding = bucket_rows(config), num_padding_samples(config)
        self.parameters = [p for p in model.dense_parameters() if p.requires_grad]
        self._buckets: dict[Key, _Bucket] = {}
        self._pool: Any = None  # of their memory
        self._eager_bytes = 0  # what a bucket's first run took beside the graphs
        self._stream: torch.cuda.Stream | None = None  # of first runs; cuBLAS keeps 64 MiB for each that it has seen
        self._shares = config.train.graph_memory == "shared"
        self._room: _Room | None = None  # where all graphs read, if they share it
        self._most: Key = ()  # rows of each event type that a batch has had: what shared rooms are made for

    @property
    def num_graphs(self) -> int:
        return len(self._buckets)

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is of the graphs' size, and its bucket has a graph or may get one."""
        if batch.num_samples != self.num_samples:
            return False
        if self._key(batch) in self._buckets or len(self._buckets) < MAX_GRAPHS:
            return True
        warnings.warn(
            f"train.cuda_graphs: totals of events vary over more than {MAX_GRAPHS} buckets; steps in others are not "
            "replayed. data.balance_window makes them more alike",
            stacklevel=2,
        )
        return False

    def prepare(self, batch: Batch) -> None:
        """Captures the graph of a batch's bucket; changes nothing else."""
        if self.takes(batch) and self._key(batch) not in self._buckets:
            self._bucket(batch)

    def __call__(self, batch: Batch, share: float) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """One forward and backward.

        Args:
            batch: on the device; `takes` says whether it can be.
            share: the loss and all gradients are multiplied by it.

        Returns:
            logits [B, K], the loss times `share`, and what hands the gradients on: to `grad` of the dense parameters,
            and through the tables' own backward. The gradients are the graph's own memory until the next call.
        """
        embeddings_BnW, event_rows = self.model.embeddings(batch)
        bucket = self._bucket(batch)
        looked_up = (embeddings_BnW, *(event_rows[name] for name in bucket.inputs.event_rows))
        _fill(bucket.inputs, batch, looked_up, share)
        outputs = self._replay(bucket)

        def backward() -> None:
            self._hand_on(outputs.parameter_grads)
            pairs = [
                (x, grad[: x.shape[0]])
                for x, grad in zip(looked_up, outputs.leaf_grads, strict=True)
                if x.requires_grad and grad is not None
            ]
            torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])

        return outputs.logits_BK.clone(), outputs.loss.clone(), backward

    def _hand_on(self, grads: tuple[Tensor | None, ...]) -> None:
        """To the parameters. The next replay overwrites them, so where several batches make a step they are copied."""
        several = self.config.train.accumulate > 1
        for p, grad in zip(self.parameters, grads, strict=True):
            if grad is None:
                continue
            if p.grad is None:
                p.grad = grad.clone() if several else grad
            else:
                p.grad += grad

    def _key(self, batch: Batch) -> Key:
        totals = (batch.events[event.name].timestamps_T.shape[0] for event in self.model.schema.events)
        return tuple(-(-max(total, 1) // self.rows) * self.rows for total in totals)

    def _bucket(self, batch: Batch) -> _Bucket:
        key = self._key(batch)
        if key not in self._buckets:
            if sum(key) > max(map(sum, self._buckets), default=0) or (self._room and not self._room.holds(key)):
                self._drop()
            self._most = tuple(map(max, key, self._most or key))
            try:
                bucket = _Bucket(self._make_inputs(key, batch))
                _fill(bucket.inputs, batch, (), 1.0)
                if self.device.type == "cuda":
                    self._capture(bucket)
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(self._no_room(key, error)) from error
            self._buckets[key] = bucket
        return self._buckets[key]

    def _no_room(self, key: Key, error: torch.OutOfMemoryError) -> str:
        each = bytes_per_graph(self.config, self.model, sum(key)) / 2**30
        keep = "which share" if self._shares else f"of which each keeps {each:.1f} GiB of"
        remedy = "" if self._shares else "train.graph_memory=shared (then they keep one for all), "
        return (
            f"train.cuda_graphs: no memory for a graph of {sum(key)} rows beside {self.num_graphs} others, {keep} "
            f"inputs and gradients. Set {remedy}data.balance_window=8 (batches of one size need one graph), or a "
            f"smaller data.batch_size. {error}"
        )

    def _drop(self) -> None:
        """Lets all graphs go before one that is larger than they are: smaller ones find room in what it leaves of the
        pool, and it would find none in theirs. Those that come again are captured again."""
        self._buckets.clear()
        self._pool = self._room = None

    def _make_inputs(self, key: Key, batch: Batch) -> _Inputs:
        """Zeros, but for sizes: of a sample without ids, floats and labels, at time 0."""
        schema, device = self.model.schema, self.device
        num, width = self.num_samples + self.num_padding, self.config.model.embedding_dim
        room = self._room or _Room.make(self._most if self._shares else key, batch, schema, width, device)
        if self._shares:
            self._room = room
        events, rows = {}, {}
        for event, total in zip(schema.events, key, strict=True):
            given = batch.events[event.name]
            events[event.name] = Events(
                room.floats[event.name][:total], room.timestamps[event.name][:total],
                given.offsets_S.new_zeros(num + 1), self.config.data.max_length,
            )  # fmt: skip
            for feature in event.ids:
                name = schema.event_key(event.name, feature.name)
                rows[name] = room.rows[name][:total].requires_grad_()
        padded = Batch(
            ids=batch.ids, event_ids=batch.event_ids, dense_BC=batch.dense_BC.new_zeros(num, batch.dense_BC.shape[1]),
            timestamps_B=batch.timestamps_B.new_zeros(num), labels_BK=batch.labels_BK[:0],
            sample_ids_B=batch.sample_ids_B[:0], events=events,
        )  # fmt: skip
        embeddings = torch.zeros(num, len(schema.ids), width, device=device, requires_grad=True)
        return _Inputs(embeddings, rows, padded, batch.labels_BK.clone(), torch.ones((), device=device))

    def _replay(self, bucket: _Bucket) -> _Outputs:
        if bucket.graph is None:
            return self._run(bucket.inputs)
        bucket.graph.replay()
        assert bucket.outputs is not None
        return bucket.outputs

    def _run(self, inputs: _Inputs) -> _Outputs:
        """What a graph holds."""
        with autocast(self.config, self.device):
            logits_PK = self.model.from_embeddings(inputs.embeddings_PnW, inputs.event_rows, inputs.batch)
        logits_BK = logits_PK[: self.num_samples]
        loss = self.loss_of(logits_BK, inputs.labels_BK) * inputs.share
        leaves = tuple(inputs.leaves())
        grads = torch.autograd.grad(loss, [*leaves, *self.parameters], allow_unused=True)
        laid = [_laid_as(p, grad) for p, grad in zip(self.parameters, grads[len(leaves) :], strict=True)]
        return _Outputs(logits_BK.detach(), loss.detach(), grads[: len(leaves)], tuple(laid))

    def _capture(self, bucket: _Bucket) -> None:
        """Runs once as it is where memory allows it, so that nothing is compiled inside a capture; then captures.

        All graphs share one pool: they run one after another, and what they return is used before the next one runs.
        A tensor that a graph returned keeps its place in the pool; with `graph_memory="shared"` it is let go, and the
        next capture may put anything there.
        """
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        cached_bytes = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if self._pool is None or free_bytes + cached_bytes > 1.1 * self._eager_bytes:
            self._run_beside(bucket.inputs)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        gc.collect()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # relaxed: other threads read and pin batches meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"):
            outputs = self._run(bucket.inputs)
        bucket.graph, bucket.outputs = graph, _borrowed(outputs) if self._shares else outputs

    def _run_beside(self, inputs: _Inputs) -> None:
        """Once on another stream, as a capture does it."""
        before = torch.cuda.memory_allocated(self.device)
        stream = self._stream = self._stream or torch.cuda.Stream(self.device)
        here = torch.cuda.current_stream(self.device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            self._run(inputs)
        here.wait_stream(stream)
        torch.cuda.synchronize(self.device)
        self._eager_bytes = max(self._eager_bytes, torch.cuda.max_memory_allocated(self.device) - before)


class _Place:
    """Where a tensor lies, without keeping it there: what `torch.as_tensor` makes a tensor from that owns nothing."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape), "strides": tuple(n * size for n in x.stride()),
            "typestr": f"<f{size}", "data": (x.data_ptr(), False), "version": 3,
        }  # fmt: skip


BORROWED_DTYPES = (torch.float32, torch.float64, torch.float16)  # numpy's; another tensor is kept


def _borrowed(outputs: _Outputs) -> _Outputs:
    """The same memory, but for logits and loss not kept: valid from a replay of its graph to the next of any graph.

    The pool's memory stays while a graph of it lives, and only captures take from it.
    """

    def borrow(x: Tensor | None) -> Tensor | None:
        if x is None or x.dtype not in BORROWED_DTYPES or not x.numel():
            return x
        return torch.as_tensor(_Place(x), device=x.device)

    return _Outputs(
        outputs.logits_BK, outputs.loss, tuple(map(borrow, outputs.leaf_grads)),
        tuple(map(borrow, outputs.parameter_grads)),
    )  # fmt: skip


def _laid_as(parameter: Tensor, grad: Tensor | None) -> Tensor | None:
    """With the strides of its parameter, as fused optimizers want it; a product may return its transpose."""
    if grad is None or grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter).copy_(grad)


@torch.no_grad()
def _fill(inputs: _Inputs, batch: Batch, looked_up: tuple[Tensor, ...], share: float) -> None:
    """Copies a batch and the rows of its ids in, and deals the rows that are left to the samples that pad."""
    num = batch.num_samples
    for own, given in zip(inputs.leaves(), looked_up, strict=False):
        own[: given.shape[0]].copy_(given)
        own[given.shape[0] :].zero_()
    inputs.labels_BK.copy_(batch.labels_BK)
    inputs.share.fill_(share)
    inputs.batch.dense_BC[:num].copy_(batch.dense_BC)
    inputs.batch.timestamps_B[:num].copy_(batch.timestamps_B)
    for name, events in batch.events.items():
        own, total = inputs.batch.events[name], events.timestamps_T.shape[0]
        padding, num_padding = own.timestamps_T.shape[0] - total, own.offsets_S.shape[0] - 1 - num
        own.floats_TC[:total].copy_(events.floats_TC)
        own.floats_TC[total:].zero_()
        own.timestamps_T[:total].copy_(events.timestamps_T)
        own.timestamps_T[total:].zero_()
        own.offsets_S[: num + 1].copy_(events.offsets_S)
        steps = torch.arange(1, num_padding + 1, device=own.offsets_S.device)
        own.offsets_S[num + 1 :].copy_(total + steps * padding // num_padding)
