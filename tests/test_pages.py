"""Tests the documentation's pages: their Python runs as printed, commands and settings exist."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from zoo.libraries import define_operators_of_torchvision, missing

from fasth.tools import cli

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "native/README.md")),
    ROOT / "experiments" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "src").rglob("README.md")),
]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = {"", "sh"}
PLACEHOLDERS = {"your_script.py"}
OTHER_LIBRARIES = ("accelerate", "lightning", "peft", "timm", "transformers")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[str]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(block["text"]) for block in found if block["language"] in languages]


def without_blocks(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command: in blocks for a shell, in indented blocks, and in sentences, between backticks."""
    text = without_blocks(page)
    lines = [line for block in blocks(page, *SHELL) for line in block.splitlines()]
    lines += re.findall(r"^    (.+)$", text, re.MULTILINE)
    lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    for line in lines:
        if re.match(r"(?:[A-Z_]+=\S+ )*(?:make|python|fasth|torchrun|pip) ", line):
            words = shlex.split(re.sub(r"[\[\]]", " ", line) if "--" in line else line, comments=True)
            while "=" in words[0]:
                words = words[1:]
            yield words


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
WITH_COMMANDS = [page for page in PAGES if any(True for _ in commands(page))]


@pytest.fixture
def as_torchrun_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs a page in an empty folder as the only process of a group, and cleans up afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("as_torchrun_would")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_the_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "page"}
    lacking: set[str] = set()
    for block in blocks(page, "python"):
        used = {name for name in OTHER_LIBRARIES if re.search(rf"^(?:import|from) {name}\b", block, re.MULTILINE)}
        if used and (new := missing(tuple(used))):
            lacking.update(new)
            continue
        if used:
            define_operators_of_torchvision()  # which timm, transformers and Lightning import
        with warnings.catch_warnings():
            if used:
                warnings.simplefilter("ignore")  # of these libraries
            exec(compile(block, name_of(page), "exec"), names)
    assert "nan" not in capsys.readouterr().out
    if lacking:
        pytest.skip(f"the blocks for {', '.join(sorted(lacking))} did not run: not installed; `make zoo` installs them")


def test_code_is_marked_as_what_it_is() -> None:
    """A block in a language that no test knows would not be checked."""
    known = {*SHELL, "python", "text", "bibtex", "{toctree}", "yaml", "toml", "cpp"}
    for page in PAGES:
        for block in FENCE.finditer(page.read_text(encoding="utf-8")):
            assert block["language"] in known, f"{name_of(page)}: {block['language']}"


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_the_commands_exist(page: Path) -> None:
    for program, *words in commands(page):
        {"make": targets, "python": script, "torchrun": script, "fasth": parses, "pip": extras}[program](words)


def targets(words: list[str]) -> None:
    known = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for word in words:
        assert "=" in word or word in known, f"make has no target {word}"


def script(words: list[str]) -> None:
    """The file or module is there, and its folder, or the harness of the experiments, knows the options."""
    place = words.index("-m") + 1 if "-m" in words else next(i for i, word in enumerate(words) if word.endswith(".py"))
    name, options = words[place], [word for word in words[place + 1 :] if word.startswith("--")]
    if name in PLACEHOLDERS:
        return
    found = importlib.util.find_spec(name) if "-m" in words else None
    path = Path(found.origin) if found and found.origin else ROOT / name
    assert path.is_file(), f"there is no {name}"
    folders = [path.parent, *path.parent.parent.glob("harness")]
    source = "".join(file.read_text(encoding="utf-8") for folder in folders for file in folder.glob("*.py"))
    for option in options:
        known = option == "--help" or f'"{option}"' in source or f'"{option[2:]}"' in source  # also made from a name
        assert known, f"{name} has no option {option}"


def parses(words: list[str]) -> None:
    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
        parse(parser, arguments)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        cli.main(words)


def extras(words: list[str]) -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for names in re.findall(r"\[(.+?)\]", " ".join(words)):
        for name in names.split(","):
            assert re.search(rf"^{name} = \[", settings, re.MULTILINE), f"fasth has no extra {name}"


def test_variables_are_those_that_are_read() -> None:
    read = [*(ROOT / "src").rglob("*.py"), *(ROOT / "native").glob("*"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    known = set(re.findall(r"FASTH_[A-Z_]+", "".join(path.read_text(encoding="utf-8") for path in read)))
    for page in PAGES:
        if page.stem.lower() == "changelog":  # which also names what is gone
            continue
        unknown = set(re.findall(r"FASTH_[A-Z_]+", page.read_text(encoding="utf-8"))) - known
        assert not unknown, f"{name_of(page)}: nothing reads {', '.join(sorted(unknown))}"


LINKED = [*PAGES, *ROOT.glob("[A-Z]*.md"), *ROOT.glob(".github/**/*.md")]


@pytest.mark.parametrize("page", dict.fromkeys(LINKED), ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Links to files and headings, as GitHub resolves them. ``make docs`` checks those of the site."""
    for target in re.findall(r"\]\(([^()\s]+)\)|<img src=\"([^\"]+)\"", re.sub(r"`[^`\n]+`", "", without_blocks(page))):
        path, _, anchor = (target[0] or target[1]).partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: there is no {path}"
        if anchor and there.suffix == ".md":
            assert anchor in headings(there), f"{name_of(page)}: {path} has no heading {anchor}"


def headings(page: Path) -> set[str]:
    """The headings' anchors as GitHub writes them."""
    found = re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in found}


def test_what_no_command_is_fails() -> None:
    for check, words in ((targets, ["tset"]), (script, ["examples/dmeo.py"]), (script, ["examples/demo.py", "--qick"])):
        with pytest.raises(AssertionError):
            check(words)
    with pytest.raises(SystemExit):
        parses(["tune", "--rosw", "3"])
    with pytest.raises(AssertionError):
        extras(["install", "fasth[flwos]"])
