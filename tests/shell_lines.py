"""The commands that stand in the Markdown files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "libs/**/*.md", "recipes/**/*.md", "tools/**/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)


def blocks(path: Path, *languages: str) -> list[str]:
    """The content of its fenced blocks in these languages, in order."""
    return [match[2] for match in FENCE.finditer(path.read_text(encoding="utf-8")) if match[1] in languages]


def typed(path: Path) -> list[tuple[str, str]]:
    """(language, command) for the lines of its `console` blocks that start with `$ `, and for those of its `sh` blocks,
    in order, without comments."""
    found = []
    for match in FENCE.finditer(path.read_text(encoding="utf-8")):
        if match[1] in ("console", "sh"):
            lines = match[2].replace("\\\n", " ").splitlines()
            if match[1] == "console":
                lines = [line[2:] for line in lines if line.startswith("$ ")]
            found += [(match[1], line) for full in lines if (line := re.split(r"(?:^|\s+)#", full)[0].strip())]
    return found


def commands(path: Path) -> list[str]:
    """The commands of its `console` and `sh` blocks."""
    return [line for _, line in typed(path)]


def register_recipe(site: Path) -> None:
    """Write what an installation of the recipe would bring into `site`: torchx finds its components by it."""
    project = tomllib.loads((ROOT / "recipes/gem/pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / "gemworks_gem-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gemworks-gem\nVersion: 0\n")
    entries = [f"[{g}]\n" + "".join(f"{n} = {t}\n" for n, t in e.items()) for g, e in project["entry-points"].items()]
    (info / "entry_points.txt").write_text("\n".join(entries))


def sources() -> list[str]:
    """The six packages' source folders."""
    return [str(path) for path in (*sorted(ROOT.glob("*/*/src")), ROOT / "tools/src")]
