"""Hooks of mkdocs: pages for Markdown that lies outside of docs/, and pages that are generated.

One source for each text: a package's README is its page. Links between files of the repository become links between
pages; a link to a file that is no page becomes the file's path, as code.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath, relpath

import tables  # beside this file, where mkdocs looks for it
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
    made = {"support.md": tables.support(), "decisions/index.md": tables.decisions(), **tables.measured()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    _navigate(files, config)
    return files


def _navigate(files: Files, config: MkDocsConfig) -> None:
    """Complete the navigation: pages that it does not name are found by their folder and name."""
    named = set(re.findall(r"[\w/]+\.md", repr(config.nav)))
    left = sorted(file.src_uri for file in files.documentation_pages() if file.src_uri not in named)
    assert config.nav is not None
    sections = {title: entry[title] for entry in config.nav if isinstance(entry, dict) for title in entry}
    for entry in sections["Libraries"]:
        ((title, page),) = entry.items()
        details = [other for other in left if other.startswith(f"{page.removesuffix('.md')}_")]
        if details:
            entry[title] = [page, *({_title(files, other): other} for other in details)]
        left = [other for other in left if other not in details]
    sections["Measured"].append({"Row by row": [{page[9:-3]: page} for page in left if page.startswith("measured/")]})
    sections["Project"] += [page for page in left if "/" not in page]
    changes = [{page[8:-3]: page} for page in left if page.startswith("changes/")]
    sections["Project"].append({"Changes": changes})
    # a hundred decisions have an index instead; so has what else is left, or the strict build complains


def _title(files: Files, page: str) -> str:
    """The name of a page below its library: `jagged_flash_attention` is "flash_attention"; others have a heading."""
    file = files.get_file_from_path(page)
    assert file is not None
    heading = file.content_string.split("\n", 1)[0].removeprefix("# ")
    return heading if len(heading) <= 28 else page.rpartition("/")[2].partition("_")[2].removesuffix(".md")


def _lists_apart(markdown: str) -> str:
    """A blank line between a paragraph and the list below it: GitHub needs none, Python's Markdown does."""
    blocks = re.split(r"(\n{2,})", markdown)
    return "".join(
        block if re.match(r"\s|[-*] |[|>]|\d+\. ", block) else re.sub(r"\n(?=(- |\d+\. ))", "\n\n", block, count=1)
        for block in blocks
    )


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

    rewritten = LINK.sub(replace, _lists_apart(FENCE.sub(hide, markdown)))
    return re.sub(r"\x00(\d+)\x00", lambda match: kept[int(match[1])], rewritten)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """What a browser lays out badly: in tables long names may fold and "27.7 %" may not; many rows get a frame."""

    def fold(name: re.Match[str]) -> str:
        return re.sub(r"(_|::|/|\.)", r"\1<wbr>", name[0])

    def cell(match: re.Match[str]) -> str:
        text = re.sub(r"(\d) %", "\\1\u00a0%", match[0])
        return re.sub(r"(?<=<code>)[^<\s]{24,}(?=</code>)", fold, text)

    def frame(match: re.Match[str]) -> str:
        return f'<div class="rows">{match[0]}</div>' if match[0].count("<tr>") > 45 else match[0]

    html = re.sub(r"<td.*?</td>", cell, html, flags=re.DOTALL)
    return re.sub(r"<table>.*?</table>", frame, html, flags=re.DOTALL)
