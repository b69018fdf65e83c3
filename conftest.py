"""What every test of the repository gets: the packages' sources for the programs it starts, the same random numbers
whatever ran before it, and no time limit of its own that a busy machine could miss.
"""

from __future__ import annotations

import os
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Installed packages are found anyway; in a checkout without an installation, or in a sandbox of Pants, they are not.
_sources = [path for path in sys.path if path and Path(path).name == "src" and (Path(path) / "gemworks").is_dir()]
_before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*_before, *_sources]))

if find_spec("hypothesis"):  # a GPU machine may have pytest alone
    from hypothesis import HealthCheck, settings

    # An example may take long on a busy machine, and so may drawing it. Under CI hypothesis derives its examples from
    # the test's name; this profile keeps that.
    settings.register_profile("gemworks", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("gemworks")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Tests run in any order, spread over workers; what they draw without a seed of their own must not depend on it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
