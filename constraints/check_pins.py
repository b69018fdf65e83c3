"""Says which installed packages a constraints file does not pin, or pins at another version; exit code 1 if any.

python constraints/check_pins.py constraints/cpu.txt
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path


def canonical(name: str) -> str:
    """PEP 503's form of a package name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def unpinned(installed: dict[str, str], pinned: dict[str, str]) -> list[str]:
    """`name==version` of what is installed and differs from the pins. A local version part (`+cpu`) does not count."""
    return [f"{name}=={v}" for name, v in sorted(installed.items()) if pinned.get(name) != v.split("+")[0]]


def main(path: str) -> int:
    lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    pinned = {canonical(name): version for name, version in (line.split("==") for line in lines)}
    pinned.setdefault("fbgemm-gpu", pinned.get("fbgemm-gpu-cpu", ""))  # the stand-in of constraints/fbgemm-gpu-stub
    installed = {canonical(d.name): d.version for d in importlib.metadata.distributions()}
    ours = {name for name in installed if name == "pip" or name.startswith("gemworks-")}
    wrong = unpinned({name: v for name, v in installed.items() if name not in ours}, pinned)
    print(f"{len(installed) - len(ours)} packages, {len(wrong)} not as in {path}", *wrong, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
