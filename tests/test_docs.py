"""The documentation site: what Sphinx itself does not see to."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PUBLIC = ["fasth", "fasth.spectrum", "fasth.parametrizations", "fasth.flows", "fasth.adapters", "fasth.nn.lipschitz"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A program of docs/, imported by its name."""
    monkeypatch.syspath_prepend(DOCS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(DOCS)):
            del sys.modules[name]


def test_the_reference_has_every_public_name() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.rst"))
    whole = set(re.findall(r"^\.\. automodule:: (\S+)\n   :members:", text, re.MULTILINE))
    listed = set(re.findall(r"^\.\. auto(?:class|function):: (\S+)", text, re.MULTILINE))
    for module in PUBLIC:
        for name in importlib.import_module(module).__all__:
            submodule = isinstance(getattr(sys.modules[module], name), ModuleType)
            places = {f"{module}.{name}", f"fasth.{name}"}
            assert module in whole or submodule or places & listed, f"{module}.{name} is in no page of the reference"
    for library in ("nflows", "normflows", "freia", "zuko"):
        assert f"fasth.flows.{library}.SVDTransform" in listed


def site(folder: Path, **pages: str) -> Path:
    for name, body in pages.items():
        (folder / f"{name}.html").write_text(f"<html><body>{body}</body></html>", encoding="utf-8")
    return folder


def test_sound_links_pass(tmp_path: Path, script: type[ModuleType]) -> None:
    check = script("check_links")
    (tmp_path / "style.css").write_text("a { color: red }")
    there = '<link rel="stylesheet" href="style.css"><h1 id="top">T</h1><a href="https://pytorch.org">elsewhere</a>'
    site(tmp_path, index='<a href="other.html#top">o</a> <a href="#here" id="here">h</a>', other=there)
    assert list(check.problems(tmp_path)) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="nowhere.html">n</a>', "which is not there"),
        ('<img src="no.png">', "which is not there"),
        ('<a href="index.html#nowhere">n</a>', "no such place"),
        ('<a href="#nowhere">n</a>', "no such place"),
        ('<script src="https://cdn.example.org/x.js"></script>', "which is not on the site"),
        ('<link rel="stylesheet" href="//fonts.example.org/x.css">', "which is not on the site"),
    ],
)
def test_broken_links_are_found(tmp_path: Path, script: type[ModuleType], body: str, problem: str) -> None:
    found = list(script("check_links").problems(site(tmp_path, index=body)))
    assert len(found) == 1 and problem in found[0]


def test_style_sheets_load_nothing_from_elsewhere(tmp_path: Path, script: type[ModuleType]) -> None:
    (tmp_path / "style.css").write_text('@import "https://fonts.example.org/x.css"; b { background: url(own.png) }')
    found = list(script("check_links").problems(site(tmp_path, index="")))
    assert found == ["style.css loads https://fonts.example.org/x.css, which is not on the site"]


def test_an_empty_site_is_a_problem(tmp_path: Path, script: type[ModuleType]) -> None:
    assert len(list(script("check_links").problems(tmp_path))) == 1


def test_the_page_of_examples_shows_what_is_run(script: type[ModuleType]) -> None:
    run, page = script("run_examples"), (DOCS / "examples.md").read_text(encoding="utf-8")
    for name, example in run.EXAMPLES.items():
        command = "make demo" if name == "demo" else example.command
        start = f"```sh\n{command}\n```\n\n<!-- {name}:start -->\n" + ("" if example.markdown else "```text\n")
        assert start in page and f"{start}<!--" not in page
        assert example.picture is None or f"(examples/{name}.png)" in page


def test_output_is_without_what_only_a_terminal_shows(script: type[ModuleType]) -> None:
    run = script("run_examples")
    printed = f"\ntraining ━━━━━ 3/3\nloss 1.0   \nThe picture is in {run.ROOT / 'build' / 'a.png'}.\n\n"
    assert run.readable(printed) == "loss 1.0\nThe picture is in build/a.png."
