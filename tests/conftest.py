"""The six packages as the repository-level tests see them."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# shell_lines.py is shared by tests of this folder; importlib mode does not put the folder on the path.
sys.path.insert(0, str(Path(__file__).parent))


@dataclass(frozen=True)
class Import:
    """One import statement.

    Attributes:
        module: the absolute dotted name, relative imports resolved.
        path, line: where it stands.
        optional: inside a function, a `try`, or `if TYPE_CHECKING`: importing the file does not need it.
    """

    module: str
    path: Path
    line: int
    optional: bool


@dataclass(frozen=True)
class Package:
    """One of the six distributions.

    Attributes:
        name: its name under `gemworks`.
        folder: where its pyproject.toml lies.
        may_import: names of the other packages that its sources may import: a library none, the recipe all libraries.
    """

    name: str
    folder: Path
    may_import: frozenset[str]

    @property
    def distribution(self) -> str:
        return f"gemworks-{self.name}"

    @property
    def module(self) -> str:
        return f"gemworks.{self.name}"

    @property
    def source(self) -> Path:
        return self.folder / "src" / "gemworks" / self.name

    @property
    def is_library(self) -> bool:
        return self.folder.parent == ROOT / "libs"

    @property
    def pyproject(self) -> dict:
        return tomllib.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))

    def imports(self, *subfolders: str) -> Iterator[Import]:
        """All imports in the Python files under these subfolders of the package, where they exist."""
        for subfolder in subfolders:
            for path in sorted((self.folder / subfolder).rglob("*.py")):
                yield from file_imports(path, self.folder / "src")


LIBRARIES = frozenset({"jagged", "precision", "parallel", "netmem"})
PACKAGES = (
    *(Package(name, ROOT / "libs" / name, frozenset()) for name in sorted(LIBRARIES)),
    Package("gem", ROOT / "recipes" / "gem", LIBRARIES),
    Package("cli", ROOT / "tools", LIBRARIES | {"gem"}),
)


def file_imports(path: Path, source_root: Path) -> Iterator[Import]:
    """The imports of one file: statements, and `import_module` or `__import__` of a constant."""
    try:
        parts = path.relative_to(source_root).with_suffix("").parts
    except ValueError:  # tests and benchmarks lie outside of src and have no package
        parts = ()
    package = parts if path.name == "__init__.py" else parts[:-1]
    optional_blocks = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Try

    def visit(node: ast.AST, optional: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, path, node.lineno, optional) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (*package[: len(package) - node.level + 1],) if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from (Import(f"{module}.{alias.name}", path, node.lineno, optional) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (Import(name, path, node.lineno, optional) for name in names)
        is_type_checking = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from visit(child, optional or is_type_checking or isinstance(node, optional_blocks))

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`package` runs a test for each of the six, `library` for each of the four."""
    if "package" in metafunc.fixturenames:
        metafunc.parametrize("package", PACKAGES, ids=lambda p: p.name)
    if "library" in metafunc.fixturenames:
        metafunc.parametrize("library", [p for p in PACKAGES if p.is_library], ids=lambda p: p.name)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def packages() -> tuple[Package, ...]:
    """All six packages."""
    return PACKAGES
