"""Links in every Markdown file lead to a file, and to a heading of it: the site's build sees its own pages only."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
MADE_FOR_THE_SITE = {"docs/support.md"}


def pages() -> list[Path]:
    command = ["git", "ls-files", "*.md"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except OSError:  # no git here
        found = ""
    return [ROOT / name for name in found.splitlines()] or [p for p in ROOT.rglob("*.md") if ".venv" not in p.parts]


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them.

    >>> sorted(anchors("## What runs where?\\n### `Jagged` and `from_*`"))
    ['jagged-and-from_', 'what-runs-where']
    """
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(path: Path, text: str) -> list[str]:
    """Targets that a page links and that are not there."""
    found = []
    for target in LINK.findall(CODE.sub("", text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        full = (path.parent / name).resolve() if name else path
        if full.relative_to(ROOT).as_posix() in MADE_FOR_THE_SITE:
            continue
        there = (
            text
            if full == path
            else full.read_text(encoding="utf-8")
            if full.suffix == ".md" and full.is_file()
            else ""
        )
        if not full.exists() or (anchor and anchor not in anchors(there)):
            found.append(target)
    return found


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    assert broken(path, path.read_text(encoding="utf-8")) == []


def test_the_finder_finds() -> None:
    text = "# A b\n[x](#a-b) [x](#b) [x](README.md) [x](READYOU.md) `[x](y)`"
    text += "[x](README.md#two-commands) [x](README.md#two)"
    assert broken(ROOT / "CONTRIBUTING.md", text) == ["#b", "READYOU.md", "README.md#two"]
    assert len(pages()) > 100
