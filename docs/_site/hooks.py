"""Hooks of mkdocs: pages for Markdown that lies outside of docs/, and pages that are generated.

One source for each text: a package's README is its page. Links between files of the repository become links between
pages; a link to a file that is no page becomes the file's path, as code.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "jagged": "libs/jagged", "precision": "libs/precision", "parallel": "libs/parallel", "netmem": "libs/netmem",
    "gem": "recipes/gem", "cli": "tools",
}  # fmt: skip
IMAGES = (".png", ".svg", ".jpg")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# Columns that tell one row of a measurement from another, and what is shown of its result.
SHOWN = (
    *(
        "op",
        "layer",
        "row",
        "config",
        "shape",
        "head_dim",
        "direction",
        "format",
        "setting",
        "attention",
        "impl",
        "batch",
    ),
    *("law", "num_ranks", "method", "ms", "tflops", "gbps", "roofline_fraction", "best_peer", "ratio_to_best_peer"),
    *(
        "local_mfu",
        "step_mfu",
        "samples_per_s",
        "ratio_to_bf16",
        "predicted_ms",
        "measured_ms",
        "error_pct",
        "ne",
        "auc",
    ),
    *("max_over_mean", "gain", "gpu"),
)
MAX_ROWS = 400


def sources() -> dict[str, Path]:
    """Page -> file of the repository, for files outside of docs/."""
    pages = {"contributing.md": ROOT / "CONTRIBUTING.md", "examples.md": ROOT / "examples/README.md"}
    for name, folder in PACKAGES.items():
        pages[f"libraries/{name}.md"] = ROOT / folder / "README.md"
        pages[f"changes/{name}.md"] = ROOT / folder / "CHANGELOG.md"
        for path in sorted((ROOT / folder / "docs").glob("*.md")):
            pages[f"libraries/{name}_{path.stem}.md"] = path
        for path in sorted((ROOT / folder / "src").rglob("README.md")):
            pages[f"libraries/{name}_{path.parent.name}.md"] = path
    return pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the images that they show."""
    pages = sources()
    for page, path in pages.items():
        files.append(File.generated(config, page, content=path.read_text(encoding="utf-8")))
        for _, _, target in LINK.findall(path.read_text(encoding="utf-8")):
            image = (path.parent / target).resolve()
            if target.endswith(IMAGES) and image.is_file() and not image.is_relative_to(ROOT / "docs"):
                name = f"images/{image.relative_to(ROOT).as_posix().replace('/', '_')}"
                if files.get_file_from_path(name) is None:
                    files.append(File.generated(config, name, abs_src_path=str(image)))
    for page, text in {"support.md": support(), "measured.md": measured(), "decisions/index.md": decisions()}.items():
        files.append(File.generated(config, page, content=text))
    _navigate(files, config)
    return files


def _navigate(files: Files, config: MkDocsConfig) -> None:
    """Complete the navigation: what it does not name is found by its folder."""
    named = set(re.findall(r"[\w/]+\.md", repr(config.nav)))
    left = sorted(file.src_uri for file in files.documentation_pages() if file.src_uri not in named)
    details = [page for page in left if page.startswith("libraries/")]
    chosen = [page for page in left if page.startswith("decisions/") and page != "decisions/index.md"]
    changes = [page for page in left if page.startswith("changes/")]
    rest = [page for page in left if page not in {*details, *chosen, *changes, "decisions/index.md"}]
    assert config.nav is not None
    if "ladder.md" in rest:  # the page comes with the first measured rows
        rest.remove("ladder.md")
        next(entry for entry in config.nav if "Measured" in entry)["Measured"].insert(0, {"The ladder": "ladder.md"})
    config.nav = [
        *config.nav,
        *([{"In depth": details}] if details else []),
        *([{"More": rest}] if rest else []),
        {"Decisions": ["decisions/index.md", *chosen]},
        {"Changes": [{page.split("/")[1].removesuffix(".md"): page} for page in changes]},
    ]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to other files of the repository."""
    here = page.file.src_uri
    by_path = {path.relative_to(ROOT).as_posix(): name for name, path in sources().items()}
    outside = {name: path for path, name in by_path.items()}
    base = outside.get(here, f"docs/{here}").rpartition("/")[0]
    kept: list[str] = []

    def replace(match: re.Match[str]) -> str:
        bang, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith(("#", "mailto:")) or not path:
            return match[0]
        full = normpath(f"{base}/{path}" if base else path)
        if bang:
            inside = full.removeprefix("docs/") if full.startswith("docs/") else f"images/{full.replace('/', '_')}"
        elif full in by_path:
            inside = by_path[full]
        elif full == "docs/decisions":
            inside = "decisions/index.md"
        elif full.startswith("docs/") and files.get_file_from_path(full.removeprefix("docs/")) is not None:
            inside = full.removeprefix("docs/")
        elif full == "README.md":
            inside = "index.md"
        else:
            assert (ROOT / full).exists(), f"{here}: link to {target}, and there is no {full}"
            return f"{text} (`{full}`)" if text.strip("`") != full else f"`{full}`"
        link = relpath(inside, here.rpartition("/")[0] or ".")
        return f"{bang}[{text}]({link}{'#' + anchor if anchor else ''})"

    def hide(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\x00{len(kept) - 1}\x00"

    rewritten = LINK.sub(replace, FENCE.sub(hide, markdown))
    return re.sub(r"\x00(\d+)\x00", lambda match: kept[int(match[1])], rewritten)


def decisions() -> str:
    """The index of decisions."""
    lines = [
        "# Decisions",
        "",
        "One page each: context, decision, consequence.",
        "",
        "| number | decision |",
        "|---|---|",
    ]
    for path in sorted((ROOT / "docs/decisions").glob("[0-9]*.md")):
        number, _, title = path.read_text(encoding="utf-8").split("\n")[0].removeprefix("# ").partition(": ")
        lines.append(f"| {number} | [{title}]({path.name}) |")
    return "\n".join(lines) + "\n"


def support() -> str:
    """Which backend runs what, from the rules that dispatch follows."""
    from gemworks import jagged, precision

    note = "`gemworks doctor` says the same of your machine, with reasons; nothing falls back silently."
    lines = ["# What runs where", "", "Generated from the rules that dispatch follows.", note, "", "## Jagged ops", ""]
    rows = [row.__dict__ if hasattr(row, "__dict__") else row._asdict() for row in jagged.support()]
    lines += _table([{key: _text(value) for key, value in row.items()} for row in rows])
    names = ("architecture", "product or cast", "recipe", "backend: kernel")
    lines += ["", "## Linear layers in FP8", ""]
    lines += _table([dict(zip(names, map(str, row), strict=True)) for row in precision.support_table()])
    return "\n".join(lines) + "\n"


def measured() -> str:
    """Every committed measurement, as tables."""
    lines = ["# Measured rows", "", "Each row is a claim: its CSV has the commit, the command and the spread.",
             "Losing rows stay in.", ""]  # fmt: skip
    for path in sorted((ROOT / "docs/measured").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            continue
        shown = [name for name in SHOWN if any(row.get(name) for row in rows)] or list(rows[0])[:8]
        lines += [f"## {path.name}", "", f"{len(rows)} rows; the whole file: [{path.name}](measured/{path.name})", ""]
        lines += [*_table([{name: _short(row.get(name) or "") for name in shown} for row in rows[:MAX_ROWS]]), ""]
    return "\n".join(lines)


def _table(rows: list[dict[str, str]]) -> Iterator[str]:
    yield f"| {' | '.join(rows[0])} |"
    yield f"|{'---|' * len(rows[0])}"
    for row in rows:
        yield f"| {' | '.join(str(value).replace('|', chr(92) + '|') for value in row.values())} |"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (tuple, list, set, frozenset)):
        return ", ".join(_text(item) for item in value)
    return str(value).removeprefix("torch.")


def _short(text: str) -> str:
    try:
        return f"{float(text):.4g}" if "." in text or "e" in text else text
    except ValueError:
        return text if len(text) <= 60 else text[:57] + "..."
