"""The record of the cases run with one seed, kept in a file between runs, and its summary as Markdown."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NOT_IN_CASES = ("__init__", "__main__", "outcome", "run", "state", "troubled", "workers")
Span = tuple[int, int]  # from a case up to, not including, another


@dataclass
class State:
    seed: int
    path: Path
    spans: list[Span] = field(default_factory=list)  # of the cases that are done, in order and apart
    subjects: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)
    failures: list[tuple[int, str, str]] = field(default_factory=list)  # case, description, what is wrong
    versions: dict[str, int] = field(default_factory=dict)  # of fasth, torch, the machine and the fuzzer: cases
    seconds: float = 0.0
    end: int = 0  # no case from here on has been handed out

    def __post_init__(self) -> None:
        self._version = version()

    @classmethod
    def load(cls, path: Path, seed: int) -> State:
        if not path.exists():
            return cls(seed, path)
        stored = json.loads(path.read_text())
        stored["spans"] = [tuple(span) for span in stored["spans"]]
        stored["failures"] = [tuple(failure) for failure in stored["failures"]]
        state = cls(**stored | {"path": path})
        state.end = state.spans[-1][1] if state.spans else 0
        return state

    def save(self) -> None:
        """Whole or not at all: a run may be killed at any time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self) | {"path": str(self.path.name)}, indent=1)
        partial = self.path.with_suffix(".partial")
        partial.write_text(text)
        os.replace(partial, self.path)

    def done(self) -> int:
        return sum(last - first for first, last in self.spans)

    def missing(self, cases: int | None, chunk: int) -> Iterator[Span]:
        """Spans, in chunks, of the cases below ``cases`` that are not done; if None, of the gaps between those done."""
        first = 0
        end = self.end if cases is None else cases
        for span in [*self.spans, (max(end, first), 0)]:
            last = min(span[0], end)
            for start in range(first, last, chunk):
                yield start, min(start + chunk, last)
            first = max(first, span[1])

    def add(self, span: Span, result: dict[str, Any]) -> None:
        for name in ("subjects", "dtypes", "actions"):
            counted = Counter(getattr(self, name))
            counted.update(result.get(name, {}))
            setattr(self, name, dict(counted))
        self.failures.extend(tuple(failure) for failure in result["failures"])
        self.versions[self._version] = self.versions.get(self._version, 0) + span[1] - span[0]
        merged: list[Span] = []
        for first, last in sorted([*self.spans, span]):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        self.spans = merged


def version() -> str:
    """fasth, torch, the machine, and a digest of the files that make cases: with others, cases may be others."""
    from fasth.tools.environment import describe  # here, since workers that run no real case need no torch

    about = describe()
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if file.stem not in NOT_IN_CASES:
            digest.update(file.read_bytes())
    versions = about["versions"]
    return (
        f"fasth {versions['fasth']} with the core {about['core']}, torch {versions['torch']}, "
        f"Python {versions['python']}, {about['cpu']}, {about['cores']} cores, fuzzer {digest.hexdigest()[:8]}"
    )


def summary(state: State) -> str:
    """Returns the summary as Markdown."""
    operators, changes, calls = _grouped(state.actions)
    lines = [
        f"Seed {state.seed}: {state.done():,} cases in {state.seconds / 60:.0f} minutes, of which "
        f"{len(state.failures) or 'none'} failed.",
        "",
        "| subject | cases |",
        "|---|---:|",
        *(f"| {name} | {n:,} |" for name, n in _largest_first(state.subjects)),
        "",
        f"- **dtypes**: {_listed(state.dtypes)}",
        f"- **calls**: {_listed(calls)}",
        f"- **changes between calls**: {_listed(changes)}",
        f"- **methods of operators**: {_listed(operators)}",
        *(f"- **run with** {name}: {n:,} cases" for name, n in state.versions.items()),
        *(f"- **failed**: case {case}: {what}: {failure}" for case, what, failure in state.failures),
    ]
    return "\n".join(lines) + "\n"


def _grouped(actions: dict[str, int]) -> tuple[dict[str, int], ...]:
    """Methods of operators, changes of layers, and calls."""
    from fuzz.changes import CHANGES

    changes = {change.__name__ for change in CHANGES}
    groups: tuple[dict[str, int], ...] = {}, {}, {}
    for name, n in actions.items():
        groups[0 if "." in name else 1 if name in changes else 2][name] = n
    return groups


def _largest_first(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in _largest_first(counts))
