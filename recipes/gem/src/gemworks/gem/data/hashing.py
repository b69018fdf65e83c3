"""Counter-based random numbers: every value is a pure function of a few integers, so readers need no generator state.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014): 64 bits in, 64 bits out, bijective. A stream is keyed by folding integers one at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function, elementwise."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def hash_u64(*keys: ArrayLike) -> NDArray[np.uint64]:
    """64 hashed bits of a tuple of integers, with numpy broadcasting over the keys.

    Args:
        keys: integers or integer arrays that broadcast together; negative values are taken modulo 2^64.

    Returns:
        uint64 array of the broadcast shape (at least one dimension).

    >>> int(hash_u64(1, 2)[0]) == int(hash_u64(1, 2)[0]), int(hash_u64(1, 2)[0]) == int(hash_u64(2, 1)[0])
    (True, False)
    """
    state = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            key_u64 = np.atleast_1d(np.asarray(key)).astype(np.int64, copy=False).view(np.uint64)
            state = mix(state + key_u64 + _GOLDEN)
    return state


def uniform(*keys: ArrayLike) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, a pure function of the keys.

    >>> 0.0 <= float(uniform(7, 0)[0]) < 1.0
    True
    """
    return (hash_u64(*keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(num_items: int, *keys: ArrayLike) -> NDArray[np.int64]:
    """A permutation of range(num_items) that depends on the keys only (sort by hash, ties by index).

    >>> sorted(permutation(5, 3).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(hash_u64(*keys, np.arange(num_items, dtype=np.int64)), kind="stable").astype(np.int64)
