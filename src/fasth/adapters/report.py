"""Reports how far adapters have changed a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fasth.adapters.adapted import Adapted
from fasth.adapters.kinds import Adapter
from fasth.adapters.layers import matrices_of
from fasth.adapters.targets import named_adapted


class AdapterReport(NamedTuple):
    """One adapter of one layer."""

    layer: str  # as in ``model.named_modules()``
    name: str
    kind: str
    parameters: int
    state: str  # "active", "inactive" or "merged"
    angle: float | None  # largest angle by which it turns an activation, in degrees; None if it does not turn them
    change: float | None  # ‖W′ − W‖ / ‖W‖, with W the base's weight; None if W is not dense, or if merged


class Report(Sequence[AdapterReport]):
    """The adapters of a model. ``print`` shows them as a table."""

    def __init__(self, rows: list[AdapterReport]) -> None:
        self._rows = rows

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[AdapterReport]:
        return iter(self._rows)

    def __repr__(self) -> str:
        table: list[tuple[str, ...]] = [("layer", "adapter", "kind", "state", "parameters", "turned, °", "changed, %")]
        for row in self._rows:
            numbers = (row.angle, None if row.change is None else 100 * row.change)
            shown = ("" if number is None else f"{number:.3g}" for number in numbers)
            table.append((row.layer or "model", row.name, row.kind, row.state, f"{row.parameters:,}", *shown))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        sides = "<<<<>>>"
        lines = (
            "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
            for row in table
        )
        return "\n".join(line.rstrip() for line in lines)


@torch.no_grad()
def report(model: nn.Module) -> Report:
    """Lists the adapters of ``model``, and how far each has turned or changed its layer.

    The angles of r reflections of d features take O(r²·d), the angles of a general rotation O(d³), and the change of
    each layer one merge.
    """
    return Report(
        [
            _row(where, adapted, name, adapter)  # type: ignore[arg-type]
            for where, adapted in named_adapted(model)
            for name, adapter in adapted.adapters.items()
        ]
    )


def _row(where: str, adapted: Adapted, name: str, adapter: Adapter) -> AdapterReport:
    parameters = sum(p.numel() for _, p in adapter.named_parameters() if p.requires_grad or name not in adapted.active)
    state = "merged" if name in adapted.merged else "active" if name in adapted.active else "inactive"
    change = None if state == "merged" else _change(adapted, adapter)
    return AdapterReport(where, name, adapter.kind, parameters, state, adapter.largest_angle(), change)


def _change(adapted: Adapted, adapter: Adapter) -> float | None:
    matrices = matrices_of(adapted.base)
    if isinstance(matrices, str):
        return None
    W = matrices.read(adapted.base.weight).float()  # type: ignore[arg-type]
    changed, _ = adapter.merged(W, None)
    return (torch.linalg.vector_norm(changed - W) / torch.linalg.vector_norm(W)).item()
