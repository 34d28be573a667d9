"""The paper's experiments and three more, as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fasth import functional
from fasth.reflections import planner
from fasth.reflections.plan import TRIANGULAR as TRIANGULAR_FORM
from fasth.tools.reproduce import baselines, counts, operations
from fasth.tools.reproduce.methods import (
    BASELINES,
    COMPACT,
    FULL,
    LINEAR,
    METHODS,
    PEERS,
    TRIANGULAR,
    Method,
    compact,
    compact_product,
    from_function,
    full,
    product,
    triangular,
    triangular_product,
)
from fasth.tools.reproduce.tasks import Counting, Entry, InTurns, PeakMemory, Task

ROWS = 32  # the paper's m

SEQUENTIAL = METHODS["sequential"]
PAPERS_GRID = [64 * i for i in range(1, 49)]


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    place: str  # the figure, table or section of the paper
    tasks: Sequence[Task]


@dataclass(frozen=True)
class Grid:
    """The sizes of a run."""

    rounds: int
    time_limit: float
    step: Sequence[int]
    operations: Sequence[int]
    block_size: Sequence[int]
    block_sizes: int | None  # the number of block sizes to try in 2 … 2⌈√d⌉; None tries all
    rows: Sequence[int]
    numbers_of_rows: Sequence[int]
    memory: Sequence[int]
    peers: Sequence[int]
    counts: Sequence[int]

    def at(self, sizes: Sequence[int]) -> Grid:
        """Replaces the sizes d of every experiment."""
        return Grid(
            rounds=self.rounds,
            time_limit=self.time_limit,
            step=sizes,
            operations=sizes,
            block_size=sizes,
            block_sizes=self.block_sizes,
            rows=sizes,
            numbers_of_rows=[n for n in self.numbers_of_rows if n <= 16 * max(sizes)],
            memory=sizes,
            peers=sizes,
            counts=sizes,
        )


QUICK = Grid(
    rounds=10,
    time_limit=3.0,
    step=[64, 128, 256, 512, 768, 1024],
    operations=[64, 256, 512, 768],
    block_size=[784],
    block_sizes=9,
    rows=[512],
    numbers_of_rows=[1, 8, 32, 128, 512, 1024, 2048, 4096, 8192],
    memory=[1024],
    peers=[64, 512],
    counts=[64, 1024, 4096, 16384],
)
FULL_GRID = Grid(
    rounds=100,
    time_limit=60.0,
    step=PAPERS_GRID,
    operations=PAPERS_GRID,
    block_size=[192, 784, 2048],
    block_sizes=None,
    rows=[256, 1024],
    numbers_of_rows=[2**i for i in range(14)],
    memory=[256, 1024, 3072],
    peers=[64, 128, 256, 512, 768, 1024],
    counts=[64, 256, 1024, 4096, 16384],
)


def experiments(grid: Grid) -> list[Experiment]:
    return [
        Experiment(
            "step",
            "A gradient step with one orthogonal matrix",
            "Figure 3",
            [_together(d, ROWS, [LINEAR, COMPACT, FULL, *BASELINES]) for d in grid.step],
        ),
        *(_operation(operation, grid) for operation in operations.OPERATIONS),
        Experiment(
            "block-size",
            "The block size k",
            "Section 3.3, Trade-off",
            [_block_sizes(d, grid.block_sizes) for d in grid.block_size],
        ),
        Experiment(
            "rows",
            "From few rows to many: apply the reflections, or form Q",
            "ours",
            [_together(d, rows, CHOICES, f"d = {d}, {rows} rows") for d in grid.rows for rows in grid.numbers_of_rows],
        ),
        Experiment(
            "memory",
            "Peak memory of a gradient step",
            "ours",
            [PeakMemory(d, ROWS, [LINEAR, COMPACT, FULL, *BASELINES]) for d in grid.memory],
        ),
        Experiment(
            "peers",
            "Other libraries",
            "ours",
            [_together(d, ROWS, [LINEAR, COMPACT, FULL, *PEERS]) for d in grid.peers],
        ),
        Experiment(
            "counts",
            "What a GPU would be asked to do",
            "ours; counted, not measured",
            [Counting(d, ROWS, COUNTED) for d in grid.counts],
        ),
    ]


def _together(d: int, rows: int, methods: Sequence[Method], label: str = "") -> InTurns:
    return InTurns(label or f"d = {d}", [Entry(method, d, rows) for method in methods])


def _operation(operation: operations.Operation, grid: Grid) -> Experiment:
    methods = operations.methods(operation)
    if operation.name != "inverse":  # the paper's figure has one curve for each algorithm, too
        methods = [method for method in methods if method.name not in ("sequential", "parallel")]
    title = f"The {operation.name}, forward pass and gradients"
    place = "Figures 1 and 4, Table 1" if operation.name == "inverse" else "Figure 4, Table 1"
    return Experiment(
        operation.name.split()[0].lower(), title, place, [_together(d, ROWS, methods) for d in grid.operations]
    )


def _block_sizes(d: int, number: int | None) -> InTurns:
    """Section 3.3 searches k in 2 … c⌈√d⌉; here c = 2."""
    last = max(2, 2 * math.ceil(math.sqrt(d)))
    if number is None or number >= last - 1:
        chosen = list(range(2, last + 1))
    else:
        chosen = sorted({round(2 * (last / 2) ** (i / (number - 1))) for i in range(number)})
    methods = [Entry(method, d, ROWS, k) for k in chosen for method in _with_block_size(k)]
    return InTurns(f"d = {d}", methods)


def _with_block_size(k: int) -> list[Method]:
    return [
        from_function(
            COMPACT.name, partial(functional.reflect, form="compact", block_size=k), compact, compact_product
        ),
        from_function(FULL.name, partial(functional.householder, block_size=k), full, product),
        from_function("FastH", partial(baselines.fasth, k=k), full, product),
    ]


def _applied(x: Tensor, V: Tensor) -> Tensor:
    applying = planner.plan_householder(x, V, TRIANGULAR_FORM, backend=planner.backend_for(x, V))
    return functional.run_householder(x, V, applying)


def _materialised(x: Tensor, V: Tensor) -> Tensor:
    return x @ _applied(torch.eye(V.shape[-1], dtype=V.dtype, device=V.device), V)


CHOICES = [
    LINEAR,
    from_function("applied", _applied, triangular, triangular_product),
    from_function("materialised", _materialised, triangular, triangular_product),
    TRIANGULAR,
]

COUNTED = [
    (LINEAR, counts.count),
    *((replace(method, name=f"{method.name}, kernels"), counts.by_kernels) for method in (COMPACT, FULL)),
    *((replace(method, name=f"{method.name}, blocks"), counts.count) for method in (COMPACT, FULL)),
    *((method, counts.continued if method is SEQUENTIAL else counts.count) for method in BASELINES),
]
