"""The layout in CONTRIBUTING.md: that it lists every file, and that each imports only from lines above it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fasth"
LINES = (ROOT / "CONTRIBUTING.md").read_text().split("src/fasth/  ")[1].split("\n    tests/")[0].splitlines()[1:]


def listed() -> list[str]:
    """Paths relative to the package, a folder with its slash, in the order of the layout."""
    paths, folder = [], ""
    for line in LINES:
        name, depth = line.split()[0], len(line) - len(line.lstrip())
        if depth == 6:
            folder = name if name.endswith("/") else ""
        paths.append(name if depth == 6 else folder + name)
    return paths


ORDER = listed()
# The folders with a line for each file.
DETAILED = {name.split("/")[0] for name in ORDER if not name.endswith("/") and "/" in name}


def place(path: str) -> int:
    """The line of a file: its own, or that of its folder; an ``__init__.py`` comes after the files of its package."""
    if path in ORDER:
        return ORDER.index(path)
    if path.endswith("/__init__.py"):
        return max(i for i, name in enumerate(ORDER) if name.startswith(path.removesuffix("__init__.py")))
    return max(i for i, name in enumerate(ORDER) if name.endswith("/") and path.startswith(name))


def imported(path: Path) -> set[str]:
    """The files of the package that a file imports, relative to the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fasth":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "fasth"]
        for name in names:
            parts = name.split(".")[1:]
            while parts and not (file := PACKAGE.joinpath(*parts).with_suffix(".py")).exists():
                if (file := PACKAGE.joinpath(*parts, "__init__.py")).exists():
                    break
                parts.pop()
            if parts:
                found.add(str(file.relative_to(PACKAGE)))
    return found


FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
SURFACE = [name for name in FILES if name in ("__init__.py", "__main__.py")]


def test_the_layout_lists_what_there_is() -> None:
    assert [name for name in ORDER if not (PACKAGE / name).exists()] == []
    files = [name for name in FILES if not name.endswith("__init__.py") and name not in SURFACE]
    folders = tuple(name for name in ORDER if name.endswith("/") and name.removesuffix("/") not in DETAILED)
    assert [name for name in files if name not in ORDER and not name.startswith(folders)] == []


@pytest.mark.parametrize("name", [name for name in FILES if name not in SURFACE])
def test_a_file_imports_only_from_lines_above(name: str) -> None:
    own = place(name)
    for other in imported(PACKAGE / name) - {"__init__.py"}:  # which has the version
        together = name not in ORDER and other not in ORDER and place(other) == own
        names_of_a_package = name.endswith("__init__.py") and place(other) == own
        assert place(other) < own or together or names_of_a_package, f"{name} imports {other}"


def test_the_root_is_a_table_of_contents() -> None:
    names = {path.name for path in PACKAGE.iterdir() if not path.name.startswith(("_", "."))} - {"py.typed"}
    assert len(names) <= 12, sorted(names)


def test_an_example_is_one_file() -> None:
    examples = {path.stem: path for path in (ROOT / "examples").iterdir() if path.name != "__pycache__"}
    assert all(path.suffix == ".py" for path in examples.values())
    for path in examples.values():
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        tops = {name.split(".")[0] for name in names}
        assert not tops & {*examples, "experiments"}, f"{path.name} imports {tops & {*examples, 'experiments'}}"


STEPS = (ROOT / "CONTRIBUTING.md").read_text().split("## Architecture")[1].split("\n## ")[0]


def test_the_files_of_the_architecture_exist() -> None:
    found = re.findall(r"`([\w/]+\.(?:py|hpp)|[\w/]+/)`", STEPS)
    assert len(found) > 15
    roots = (PACKAGE, ROOT, ROOT / "tests")
    assert [name for name in found if not any((root / name).exists() for root in roots)] == []


def test_the_names_of_the_architecture_exist() -> None:
    names = {
        part
        for name in re.findall(r"`(?:fasth\.|torch\.ops\.fasth\.)?([\w.:]+?)(?:\(\))?`", STEPS)
        if "/" not in name and not name.endswith((".py", ".hpp")) and not name.startswith(("torch.", "F."))
        for part in re.split(r"::|\.", name)
    }
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "native").glob("*.hpp")]
    text = "\n".join(path.read_text() for path in sources)
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []


ELSEWHERE = {"tests/test_custom_models.py"}  # a file of PEFT
PAGES = ["README.md", "CONTRIBUTING.md", *(f"{folder}/README.md" for folder in ("native", "experiments"))]
PAGES += [str(path.relative_to(ROOT)) for path in (*PACKAGE.rglob("README.md"), *(ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    """A path is relative to the page, to the repository or to the package, or the end of one of these."""
    found = re.findall(r"`([\w/-]+\.(?:py|hpp|cpp|md|toml|txt))(?:::\w+)?`", (ROOT / page).read_text(encoding="utf-8"))
    folders = ("src", "native", "tests", "docs", "examples", "experiments", "benchmarks")
    files = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.*")]
    missing = [
        name
        for name in sorted(set(found) - ELSEWHERE)
        if not (ROOT / name).exists() and not any(file.endswith("/" + name) for file in files)
    ]
    assert missing == []
