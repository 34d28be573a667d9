"""The settings of GitHub Actions and cibuildwheel agree with the Makefile, pyproject.toml and constraints.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; it comes with fasth[docs]")
tomllib = pytest.importorskip("tomllib", reason="Python 3.10 does not read TOML")

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

Version = tuple[int, ...]


def version(text: str) -> Version:
    return tuple(int(number) for number in text.split("."))


def lowest(requirement: str) -> Version:
    """The (3, 10) of "python>=3.10". A requirement of another form needs another reading."""
    found = re.fullmatch(r"[a-z]*>=([\d.]+)", requirement)
    assert found, f"expected one lower bound; got {requirement!r}"
    return version(found[1])


def read(workflow: Path) -> dict[str, Any]:
    return yaml.safe_load(workflow.read_text(encoding="utf-8"))


def texts(node: Any) -> Iterator[str]:
    """All strings below a node, so that comments are left out."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from texts(child)


def versions_of_ci() -> list[tuple[Version, Version]]:
    """Python and torch, of each row of the matrix."""
    job = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["versions"]
    return [(version(row["python"]), version(row["torch"])) for row in job["strategy"]["matrix"]["include"]]


def test_every_make_target_exists() -> None:
    known = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = {
        (workflow.name, target)
        for workflow in WORKFLOWS
        for text in texts(read(workflow)["jobs"])
        for target in re.findall(r"\bmake ([a-z0-9-]+)", text)
    }
    assert {"lint", "docs", "test", "test-torch", "sdist"} <= {target for _, target in used}
    unknown = sorted(f"{name}: make {target}" for name, target in used if target not in known)
    assert not unknown, f"the Makefile does not have what is run in {unknown}"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_its_jobs_end(workflow: Path) -> None:
    settings = read(workflow)
    assert settings["permissions"] == {"contents": "read"}
    endless = [name for name, job in settings["jobs"].items() if "uses" not in job and "timeout-minutes" not in job]
    assert not endless


def test_the_oldest_admitted_versions_are_tested_together_and_none_is_older() -> None:
    oldest_python = lowest(SETTINGS["project"]["requires-python"])
    (oldest_torch,) = (lowest(name) for name in SETTINGS["project"]["dependencies"] if name.startswith("torch"))
    tested = versions_of_ci()
    assert (oldest_python, (*oldest_torch, 0)) in tested
    assert min(python for python, _ in tested) == oldest_python
    assert min(release for _, release in tested) == (*oldest_torch, 0)


def test_the_pinned_torch_is_tested() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^torch==([\d.]+)$", constraints, re.MULTILINE)
    assert version(pinned) in {release for _, release in versions_of_ci()}


def test_wheels_begin_with_the_oldest_python() -> None:
    built = [re.fullmatch(r"cp(\d)(\d+)-\*", name) for name in SETTINGS["tool"]["cibuildwheel"]["build"]]
    pythons = [(int(name[1]), int(name[2])) for name in built if name]
    assert len(pythons) == len(built)
    assert pythons[0] == min(pythons) == lowest(SETTINGS["project"]["requires-python"])


def test_every_python_before_the_stable_abi_has_a_wheel() -> None:
    stable = SETTINGS["tool"]["scikit-build"]["wheel"]["py-api"]
    (major, first), last = lowest(SETTINGS["project"]["requires-python"]), int(stable.removeprefix("cp3"))
    needed = {f"cp{major}{minor}-*" for minor in range(first, last + 1)}
    assert needed <= set(SETTINGS["tool"]["cibuildwheel"]["build"])


def test_a_wheel_leaves_out_the_same_libraries_as_that_of_make_wheel() -> None:
    def left_out(command: str) -> list[str]:
        return re.findall(r"--exclude (\S+)", command)

    (command,) = re.findall(r"auditwheel repair .*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert left_out(SETTINGS["tool"]["cibuildwheel"]["linux"]["repair-wheel-command"]) == left_out(command)
