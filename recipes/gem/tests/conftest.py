"""Shared fixtures of the recipe's tests."""

import os
import sys
from pathlib import Path

import pytest
from gemworks.gem.data.movielens import MovieLens
from gemworks.gem.data.movielens_files import DEFAULT_CACHE, fetch

# gem_ranks.py is shared by tests of this folder; importlib mode does not put the folder on the path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def movielens_folder() -> Path:
    """MovieLens-100K in the checkout's cache (downloaded once), or where GEMWORKS_MOVIELENS points.

    Without it a developer's tests are skipped. Under CI they fail: the tests against leakage must not go unnoticed.
    """
    root = Path(__file__).resolve().parents[3]
    try:
        return fetch(os.environ.get("GEMWORKS_MOVIELENS", root / DEFAULT_CACHE))
    except RuntimeError as error:
        message = f"MovieLens-100K is not in the cache and cannot be downloaded: {error}"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(scope="session")
def movielens(movielens_folder: Path) -> MovieLens:
    """The prepared data set."""
    return MovieLens.open(movielens_folder)
