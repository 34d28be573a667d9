"""The version, the public names and the changelog of a release agree."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import fasth

ROOT = Path(__file__).parent.parent


def test_the_version_stands_in_one_place():
    assert version("fasth") == fasth.__version__
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert citation and citation[1] == fasth.__version__


def test_the_changelog_begins_with_this_version():
    released = re.findall(r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == fasth.__version__


def test_the_public_names_are_those_listed():
    assert sorted(fasth.__all__) == sorted(set(fasth.__all__))
    undocumented = [name for name in fasth.__all__ if not getattr(fasth, name).__doc__]
    assert not undocumented
