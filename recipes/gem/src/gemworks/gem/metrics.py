"""Quality metrics of binary predictions: normalised entropy, AUC, calibration, and a paired bootstrap.

Everything works on logits in float64, so that confident predictions need no clipping: the log-loss of logit z and
label y is `softplus(z) - y z`.

Shapes: N samples, K tasks, R bootstrap resamples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

NAN = float("nan")


def log_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-loss of every prediction, `softplus(z) - y z`, in nats.

    Args:
        logits: any floating dtype, any shape.
        labels: the same shape, values in {0, 1}.

    Returns:
        float64, the same shape.

    >>> log_loss(torch.tensor([0.0]), torch.tensor([1.0])).item() == math.log(2)
    True
    """
    logits = logits.double()
    return functional.softplus(logits) - labels.double() * logits


def binary_entropy(rate: float) -> float:
    """Entropy in nats of a coin that shows 1 with probability `rate`; 0 at both ends.

    >>> round(binary_entropy(0.5), 6)
    0.693147
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"rate: got {rate}, expected a value in [0, 1]; pass the mean of labels in {{0, 1}}")
    if rate in (0.0, 1.0):
        return 0.0
    return -rate * math.log(rate) - (1.0 - rate) * math.log1p(-rate)


def normalized_entropy(logits: Tensor, labels: Tensor) -> float:
    """Normalised entropy (NE): mean log-loss over the entropy of the labels' own rate.

    1 is what always predicting the rate of this very set would score; lower is better. Where all labels are equal (or
    there are none) the denominator is 0 and NE does not exist: the result is NaN, never infinity and never an
    exception, so that a stream of small windows stays usable; callers that choose a model by NE must refuse NaN.

    Args:
        logits: [N], any floating dtype.
        labels: [N], values in {0, 1}.

    Source: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014, section 3.

    >>> y = torch.tensor([1.0, 0.0, 0.0, 0.0])
    >>> rate_logit = math.log(0.25 / 0.75)
    >>> round(normalized_entropy(torch.full((4,), rate_logit), y), 6)
    1.0
    """
    sums = BinaryMetrics(num_tasks=1)
    sums.update(logits.reshape(-1, 1), labels.reshape(-1, 1))
    return sums.compute()[0].ne


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve, exact; a tie between a positive and a negative counts one half.

    The Mann-Whitney statistic over groups of equal scores, counted in integers: order of the samples cannot change the
    result. NaN where one of the two classes is absent.

    Args:
        scores: [N], any monotone score (a logit, a probability), finite.
        labels: [N], values in {0, 1}.

    Raises:
        ValueError: a score is NaN.

    >>> auc(torch.tensor([0.1, 0.5, 0.5, 0.9]), torch.tensor([0, 0, 1, 1]))
    0.875
    """
    if scores.shape != labels.shape:
        raise ValueError(
            f"scores, labels: got shapes {tuple(scores.shape)} and {tuple(labels.shape)}, expected equal ones"
        )
    if bool(torch.isnan(scores).any()):
        raise ValueError("scores: got NaN, expected finite scores; look for a non-finite prediction")
    if scores.numel() == 0:
        return NAN
    unique, group = torch.unique(scores, return_inverse=True)
    positive = (
        torch.bincount(group.reshape(-1), weights=labels.reshape(-1).double(), minlength=len(unique)).round().long()
    )
    total = torch.bincount(group.reshape(-1), minlength=len(unique))
    negative = total - positive
    num_positive, num_negative = int(positive.sum()), int(negative.sum())
    if num_positive == 0 or num_negative == 0:
        return NAN
    negative_below = torch.cumsum(negative, 0) - negative
    twice_won = int((positive * (2 * negative_below + negative)).sum())
    return twice_won / (2 * num_positive * num_negative)


@dataclass(frozen=True)
class Quality:
    """What one task's predictions are worth.

    Attributes:
        ne: normalised entropy; NaN where all labels are equal.
        log_loss: mean, nats.
        rate: mean label.
        calibration: mean predicted probability over mean label; 1 is right, above 1 predicts too much; NaN where no
            label is 1.
        num_samples: how many predictions.
        auc: NaN where it was not collected or a class is absent.
    """

    ne: float
    log_loss: float
    rate: float
    calibration: float
    num_samples: int
    auc: float = NAN


class BinaryMetrics:
    """NE, log-loss and calibration of K tasks as a stream: float64 sums on the predictions' device, no host
    synchronisation.

    Counts are exact; sums are float64, so a different order of the same samples moves the result by rounding only
    (about 1e-15 relative). `merge` joins two streams, of two processes for instance.

    >>> a, b = BinaryMetrics(num_tasks=1), BinaryMetrics(num_tasks=1)
    >>> a.update(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]]))
    >>> b.update(torch.tensor([[-1.0]]), torch.tensor([[0.0]]))
    >>> a.merge(b)
    >>> a.compute()[0].num_samples
    3
    """

    def __init__(self, num_tasks: int, device: torch.device | str = "cpu") -> None:
        self.num_tasks = num_tasks
        self.num_samples = 0
        # rows: log-loss, labels, predicted probabilities
        self.sums_3K = torch.zeros(3, num_tasks, dtype=torch.float64, device=device)

    def update(self, logits_NK: Tensor, labels_NK: Tensor) -> None:
        """Adds samples: logits and labels [N, K]."""
        _check_pair(logits_NK, labels_NK, self.num_tasks)
        logits_NK = logits_NK.detach().double()
        labels_NK = labels_NK.double()
        self.sums_3K += torch.stack(
            [log_loss(logits_NK, labels_NK).sum(0), labels_NK.sum(0), torch.sigmoid(logits_NK).sum(0)]
        )
        self.num_samples += logits_NK.shape[0]

    def merge(self, other: BinaryMetrics) -> None:
        """Adds everything `other` has seen."""
        if other.num_tasks != self.num_tasks:
            raise ValueError(
                f"other: got {other.num_tasks} tasks, expected {self.num_tasks}; merge streams of the same tasks"
            )
        self.sums_3K += other.sums_3K.to(self.sums_3K.device)
        self.num_samples += other.num_samples

    def reset(self) -> None:
        """Forgets everything."""
        self.sums_3K.zero_()
        self.num_samples = 0

    def compute(self) -> list[Quality]:
        """One `Quality` per task (AUC not collected); reads the sums on the host."""
        n = self.num_samples
        if n == 0:
            return [Quality(NAN, NAN, NAN, NAN, 0) for _ in range(self.num_tasks)]
        result = []
        for loss, label, prediction in self.sums_3K.T.tolist():
            entropy = binary_entropy(label / n)
            result.append(
                Quality(
                    ne=loss / n / entropy if entropy > 0 else NAN,
                    log_loss=loss / n,
                    rate=label / n,
                    calibration=prediction / label if label > 0 else NAN,
                    num_samples=n,
                )
            )
        return result

    def state_dict(self) -> dict[str, Tensor | int]:
        return {"sums": self.sums_3K.clone(), "num_samples": self.num_samples}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        self.sums_3K.copy_(torch.as_tensor(state["sums"]))
        self.num_samples = int(state["num_samples"])


class Predictions:
    """Every logit and label of an evaluation, in order: AUC needs them all, and paired tests need them sample by
    sample."""

    def __init__(self, num_tasks: int) -> None:
        self.num_tasks = num_tasks
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._sample_ids: list[Tensor] = []

    def update(self, logits_NK: Tensor, labels_NK: Tensor, sample_ids_N: Tensor) -> None:
        """Adds samples: logits and labels [N, K], ids int64 [N]."""
        _check_pair(logits_NK, labels_NK, self.num_tasks)
        self._logits.append(logits_NK.detach().double().cpu())
        self._labels.append(labels_NK.detach().double().cpu())
        self._sample_ids.append(sample_ids_N.cpu())

    def merge(self, other: Predictions) -> None:
        """Appends everything `other` has seen."""
        self._logits += other._logits
        self._labels += other._labels
        self._sample_ids += other._sample_ids

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits float64 [N, K], labels float64 [N, K], sample ids int64 [N]."""
        if not self._logits:
            empty = torch.zeros(0, self.num_tasks, dtype=torch.float64)
            return empty, empty.clone(), torch.zeros(0, dtype=torch.int64)
        return torch.cat(self._logits), torch.cat(self._labels), torch.cat(self._sample_ids)

    def compute(self) -> list[Quality]:
        """One `Quality` per task, AUC included. Sums run over the whole set at once, so batch sizes do not matter."""
        logits_NK, labels_NK, _ = self.tensors()
        sums = BinaryMetrics(self.num_tasks)
        sums.update(logits_NK, labels_NK)
        return [
            Quality(q.ne, q.log_loss, q.rate, q.calibration, q.num_samples, auc(logits_NK[:, k], labels_NK[:, k]))
            for k, q in enumerate(sums.compute())
        ]


@dataclass(frozen=True)
class PairedInterval:
    """The NE difference of two predictors on the same samples, `NE(a) - NE(b)`: negative means a is better.

    Attributes:
        difference: on the samples themselves.
        low, high: ends of the percentile interval.
        confidence: 0.95 for a 95 % interval.
        num_resamples: R.
    """

    difference: float
    low: float
    high: float
    confidence: float
    num_resamples: int

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


def paired_bootstrap(
    logits_a_N: Tensor,
    logits_b_N: Tensor,
    labels_N: Tensor,
    *,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
    chunk: int = 100,
) -> PairedInterval:
    """Percentile bootstrap of `NE(a) - NE(b)` over resampled samples, both predictors on the same resample.

    Each resample divides by the entropy of its own rate. Resamples in which all labels are equal have no NE and are
    left out.

    Args:
        logits_a_N, logits_b_N: [N] logits of the two predictors.
        labels_N: [N] in {0, 1}.
        num_resamples: R.
        chunk: resamples drawn at a time; memory is chunk * N * 8 bytes.

    Raises:
        ValueError: shapes differ, no samples, or one class only.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.

    >>> y = torch.tensor([1.0, 0.0] * 50)
    >>> better = paired_bootstrap(2 * y - 1, torch.zeros(100), y, num_resamples=200)
    >>> better.difference < 0 and better.excludes_zero
    True
    """
    n = labels_N.numel()
    if not logits_a_N.shape == logits_b_N.shape == labels_N.shape or labels_N.ndim != 1:
        raise ValueError(
            f"logits_a_N, logits_b_N, labels_N: got shapes {tuple(logits_a_N.shape)}, {tuple(logits_b_N.shape)}, "
            f"{tuple(labels_N.shape)}, expected three equal [N]; predict the same samples in the same order"
        )
    labels = labels_N.double().cpu()
    if n == 0 or float(labels.min()) == float(labels.max()):
        raise ValueError(f"labels_N: got {n} labels of one class, expected both classes; NE does not exist here")
    # one row per quantity, so that one gather serves all three sums
    rows_3N = torch.stack([log_loss(logits_a_N.cpu(), labels), log_loss(logits_b_N.cpu(), labels), labels])
    generator = torch.Generator().manual_seed(seed)
    differences = []
    for start in range(0, num_resamples, chunk):
        num = min(chunk, num_resamples - start)
        index_RN = torch.randint(n, (num, n), generator=generator)
        mean_a_R, mean_b_R, rate_R = (row[index_RN].mean(1) for row in rows_3N)
        entropy_R = -torch.special.xlogy(rate_R, rate_R) - torch.special.xlog1py(1 - rate_R, -rate_R)
        differences.append(((mean_a_R - mean_b_R) / entropy_R)[entropy_R > 0])
    tail = (1.0 - confidence) / 2.0
    low, high = torch.quantile(torch.cat(differences), torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    mean_a, mean_b, rate = rows_3N.mean(1).tolist()
    return PairedInterval((mean_a - mean_b) / binary_entropy(rate), low, high, confidence, num_resamples)


def _check_pair(logits_NK: Tensor, labels_NK: Tensor, num_tasks: int) -> None:
    if logits_NK.shape != labels_NK.shape or logits_NK.ndim != 2 or logits_NK.shape[1] != num_tasks:
        raise ValueError(
            f"logits_NK, labels_NK: got shapes {tuple(logits_NK.shape)} and {tuple(labels_NK.shape)}, "
            f"expected [N, {num_tasks}] twice; one column per task"
        )
