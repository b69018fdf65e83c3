"""Programs that tests start import the packages from where the tests do.

Installed packages are found anyway; in a checkout without an installation, or in a sandbox of Pants, they are not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_sources = [path for path in sys.path if path and Path(path).name == "src" and (Path(path) / "gemworks").is_dir()]
_before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*_before, *_sources]))
