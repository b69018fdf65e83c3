"""The documentation: every block of its pages and of the READMEs runs, and the site builds with no broken link.

A page's Python blocks and its `$ gemworks ...` lines run in order, as one program, in an empty folder. The other
commands are looked at in test_repo_shell_blocks.py.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/howto/*.md", "*/*/docs/*.md", "*/*/src/**/README.md", "libs/*/README.md",
                    "recipes/*/README.md", "tools/README.md", "examples/README.md")
    for path in ROOT.glob(pattern)
    if FENCE.search(path.read_text(encoding="utf-8"))
)  # fmt: skip

# Runs a page: Python as it is, `gemworks` lines through the command line's own entry.
RUNNER = """
import builtins, runpy, sys, tomllib, warnings
settings = tomllib.load(open(sys.argv[1], "rb"))["tool"]["pytest"]["ini_options"]
for line in settings["filterwarnings"]:
    action, message, category, module = (line.split(":") + [""] * 3)[:4]
    warnings.filterwarnings(action, message, getattr(builtins, category or "Warning"), module)
sys.path.insert(0, ".")
runpy.run_path(sys.argv[2], run_name="__main__")
"""


def console_lines(block: str) -> list[str]:
    """The commands of a console block."""
    return [line.removeprefix("$ ").split("    #")[0].strip() for line in block.splitlines() if line.startswith("$ ")]


def program(text: str) -> str:
    """A page as one Python program, each block at its own line numbers."""
    lines = [""] * (text.count("\n") + 1)
    for match in FENCE.finditer(text):
        first = text.count("\n", 0, match.start(2))
        if match[1] == "python":
            block = match[2].splitlines()
        elif match[1] == "console":
            block = [_as_python(line) for line in match[2].splitlines()]
        else:
            continue
        lines[first : first + len(block)] = block
    return "\n".join(lines)


def _as_python(line: str) -> str:
    command = line.removeprefix("$ ").split("    #")[0].strip() if line.startswith("$ ") else ""
    if not command.startswith("gemworks "):
        return ""
    words = shlex.split(command)[1:]
    return f"from gemworks.cli.app import run as _run; assert _run({words!r}) == 0, {command!r}"


def run_page(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "page.py"
    path.write_text(source, encoding="utf-8")
    sources = [str(p) for p in (*sorted(ROOT.glob("*/*/src")), ROOT / "tools/src")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-c", RUNNER, str(ROOT / "pyproject.toml"), str(path)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_page_runs(page: Path, tmp_path: Path) -> None:
    source = program(page.read_text(encoding="utf-8"))
    if not source.strip():
        pytest.skip("nothing in it that Python or gemworks runs")
    done = run_page(source, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_readme_begins_with_a_short_example(package) -> None:
    """13 lines with its blank ones at most: it fits in a glance."""
    first = next(m[2] for m in FENCE.finditer((package.folder / "README.md").read_text("utf-8")) if m[1] == "python")
    assert package.module in first
    assert len(first.strip().splitlines()) <= 13, "the first example is about ten lines; 13 is the most"


def test_a_wrong_block_fails(tmp_path: Path) -> None:
    """The runner can fail: at the page's own line, on warnings, and on commands."""
    done = run_page(program("# Page\n\n```python\n1 / 0\n```\n"), tmp_path)
    assert "line 4" in done.stderr
    done = run_page(program("```python\nimport warnings\nwarnings.warn('old', UserWarning)\n```\n"), tmp_path)
    assert "UserWarning: old" in done.stderr
    done = run_page(program("```console\n$ gemworks config --preset smal\n```\n"), tmp_path)
    assert "AssertionError: gemworks config --preset smal" in done.stderr


def build_site(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    sources = [str(p) for p in (*sorted(ROOT.glob("*/*/src")), ROOT / "tools/src")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.add(values.get("id") or "")
        self.links += [link for name in ("href", "src") if (link := values.get(name))]


def broken_links(site: Path) -> list[str]:
    """Links of a built site that lead nowhere. Links to other hosts are not followed."""
    pages = {path.resolve(): Links(path) for path in site.rglob("*.html") if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if "://" in link or link.startswith(("mailto:", "data:")):
                continue
            file = (path.parent / target.partition("?")[0]).resolve() if target else path
            if not file.is_file() or (anchor and file in pages and anchor not in pages[file].anchors):
                found.append(f"{path.relative_to(site.resolve())}: {link}")
    return found


@pytest.mark.slow
def test_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    done = build_site(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    shown = ("index", "support", "measured/index", "measured/jagged_h200", "ladder", "howto/launch", "libraries/jagged",
             "libraries/precision_numerics", "decisions/index", "changes/cli")  # fmt: skip
    for page in shown:
        assert (tmp_path / "site" / f"{page}.html").is_file(), page
    assert broken_links(tmp_path / "site") == []
    texts = {path: path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")}
    paragraphs = [(path.name, text) for path, html in texts.items() for text in re.findall(r"<p>.*?</p>", html, re.S)]
    assert [item for item in paragraphs if re.search(r"^(- |\d+\. )\S", item[1], re.M)] == [], "a list in a paragraph"
    support = (tmp_path / "site/support.html").read_text(encoding="utf-8")
    assert "<td><code>block_attention</code></td>" in support
    assert "mxfp8" in support
    navigation = (tmp_path / "site/measured/index.html").read_text(encoding="utf-8")
    assert re.search(
        r'href="\.\./ladder\.html" class="md-nav__link">\s*<span class="md-ellipsis">\s*The MFU ladder', navigation
    )


def test_one_line_of_support_says_no_more_than_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs/_site")
    tables = importlib.import_module("tables")
    from gemworks import jagged

    rows = jagged.support()
    lines = tables.grouped_support(rows)
    assert len(lines) == len({(row.op, row.backend, row.max_head_dim) for row in rows})
    with pytest.raises(ValueError, match="expected every combination"):
        tables.grouped_support(rows[1:])


def test_the_support_table_of_jagged_is_what_support_says() -> None:
    """Its README folds equal rows; unfolded they are those of `support()`, no more and no less."""
    from gemworks.jagged import support

    text = (ROOT / "libs/jagged/README.md").read_text(encoding="utf-8")
    section = text[text.index("\n## Support\n") : text.index("\n## Measured\n")]
    groups = {
        "norms": ["layer_norm", "rms_norm"],
        "pooling": ["kronecker_compress", "sum_pool", "mean_pool", "last_pool"],
    }
    dtypes = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
    told = []
    for line in section.splitlines():
        if not line.startswith("|") or line.startswith(("| op", "|---")):
            continue
        ops, types, places, directions, backend, width = _cells(line)
        told += [
            (op, dtypes[dtype], place, direction, backend.partition(" (")[0], None if width == "-" else int(width))
            for name in ops.split(", ")
            for op in groups.get(name, [name.strip("`")])
            for dtype in types.split(", ")
            for place in places.split(", ")
            for direction in directions.split(", ")
        ]
    rows = [(r.op, r.dtype, r.architecture, r.direction, r.backend, r.max_head_dim) for r in support()]
    assert sorted(map(str, told)) == sorted(map(str, rows))


def test_the_index_names_every_decision_and_what_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that a later one replaces says so below its title, and nowhere else, so that the index can."""
    monkeypatch.syspath_prepend(ROOT / "docs/_site")
    index = importlib.import_module("tables").decisions()
    pages = {path.name[:4]: path for path in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    assert re.findall(r"^\| (\d{4}) \|", index, re.MULTILINE) == sorted(pages)
    for number, path in pages.items():
        text = path.read_text(encoding="utf-8")
        said = re.findall(r"^\W*(?:Superseded|Changed in part) by \W*(\d{4})", text, re.MULTILINE)
        (line,) = (line for line in index.splitlines() if line.startswith(f"| {number} |"))
        assert said == re.findall(r"by \[(\d{4})\]", line), path.name
        assert all(number < later and later in pages for later in said), path.name
    assert "superseded by [0360]" in index


def test_no_decision_says_in_another_form_that_it_was_replaced() -> None:
    """A line below a title that the index's form does not fit would be shown as text, and its page as if it held."""
    for path in (ROOT / "docs/decisions").glob("[0-9]*.md"):
        third = path.read_text(encoding="utf-8").splitlines()[2]
        assert not re.match(r"\W*(?:Replaced|Superseded|Changed)", third) or re.match(
            r"\*(?:Superseded|Changed in part) by \[\d{4}\]\([\w.-]+\)", third
        ), f"{path.name}: {third}"


def test_a_long_file_shows_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours with the best peer of each, or whole steps; and the page says so. Short files are shown whole."""
    monkeypatch.syspath_prepend(ROOT / "docs/_site")
    tables = importlib.import_module("tables")
    rows = [{"impl": impl, "ms": str(n), "best_peer": "x"} for n in range(200) for impl in ("gemworks", "x", "y")]
    page = tables.measurement(Path("long.csv"), rows)
    assert all(words in page for words in ("600 rows", "the 200 rows of gemworks", "impl gemworks"))
    assert page.count("\n| ") == 201
    steps = [{"plan": str(n), "item": item, "ms": "1"} for n in range(150) for item in ("step", "a", "b")]
    assert tables.measurement(Path("plans.csv"), steps).count("\n| ") == 151
    assert tables.measurement(Path("short.csv"), steps[:300]).count("\n| ") == 301


@pytest.mark.slow
def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    page = ROOT / "docs/howto/_broken.md"
    page.write_text("# Broken\n\n[nowhere](index.md#there-is-no-such-place)\n", encoding="utf-8")
    try:
        done = build_site(ROOT / "mkdocs.yml", tmp_path / "site")
    finally:
        page.unlink()
    assert done.returncode != 0


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_readmes_table_is_the_ladders():
    """The shares of the peak in the README are those of rows of docs/ladder.md, by row and kind of attention, and the
    entropy of each column is as close as the README says."""
    text = (ROOT / "docs/ladder.md").read_text(encoding="utf-8")
    tables = re.split(r"^### (block|full) attention, .*$", text[: text.index("## Leave one out")], flags=re.MULTILINE)
    rows = {}
    for attention, table in zip(tables[1::2], tables[2::2], strict=True):
        for cells in map(_cells, table.splitlines()):
            if len(cells) == 8 and cells[4].endswith("%") and "samples" not in cells[1]:
                rows[attention, cells[0].removeprefix("+ ")] = (cells[4], float(cells[7]))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    told = [_cells(line) for line in readme.splitlines() if re.fullmatch(r"\| .*% \| .*% \|", line)]
    assert len(told) >= 5
    close = float(re.findall(r"same within ([\d.]+) in each column", " ".join(readme.split()))[0])
    for column, attention in ((2, "block"), (3, "full")):
        found = [rows[attention, cells[1].strip("`")] for cells in told]
        assert [cells[column] for cells in told] == [share for share, _ in found]
        scores = [ne for _, ne in found]
        assert max(scores) - min(scores) <= close


def test_what_the_readme_calls_missed_is_what_the_pages_say():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    missed = readme[readme.index("What is missed so far") : readme.index("## Two commands")]
    ladder = (ROOT / "docs/ladder.md").read_text(encoding="utf-8")
    local = re.findall(r"sequence layers ([\d.]+) % .*?target (\d+) %, missed", ladder)
    assert re.findall(r"([\d.]+) % with \w+ attention, where (\d+) %", missed) == local
    met, targets = re.findall(r"(\d+) of (\d+) met", (ROOT / "docs/jagged.md").read_text(encoding="utf-8"))[0]
    assert f"{int(targets) - int(met)} of {targets} [targets" in missed
    (share,) = re.findall(r"row `fp8_linears` has ([\d.]+) of the samples/s of `fast_gelu`", missed)
    (ratio,) = re.findall(r"^- Loses:.*?`fp8_linears` x([\d.]+) \(", ladder, re.MULTILINE)
    assert f"{float(ratio):.2f}" == share
    (share,) = re.findall(r"`batch_x2` has ([\d.]+) of those of `bf16_batch_x2`", missed)
    block = ladder[ladder.index("### block attention") : ladder.index("### full attention")]
    rows = {cells[0].removeprefix("+ "): cells[2] for cells in map(_cells, block.splitlines()) if len(cells) == 8}
    assert f"{float(rows['batch_x2']) / float(rows['bf16_batch_x2']):.2f}" == share
    apart = re.findall(r"samples/s \(commit\), x([\d.]+) apart", ladder)
    assert f"up to {max(apart, key=float)} times" in readme


def test_the_minutes_that_pages_promise_were_timed():
    """Ten minutes in the README and on the first page of the site: what .ci/newcomer printed."""
    (seconds,) = re.findall(r"(\d+) s  clone", (ROOT / "docs/measured/newcomer.txt").read_text(encoding="utf-8"))
    for page in ("README.md", "docs/index.md"):
        assert "about ten minutes on 2 cores" in " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert 480 <= int(seconds) <= 600
