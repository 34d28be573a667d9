"""The outcome of a case."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    subject: str
    dtype: str  # the first that was drawn
    notes: list[str]  # what describes the case
    actions: Counter[str] = field(default_factory=Counter)  # what it called and changed, how often
    failure: str | None = None  # what is wrong, if anything

    @property
    def description(self) -> str:
        return f"{self.subject}: {', '.join(self.notes)}"
