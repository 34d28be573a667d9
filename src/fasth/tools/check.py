"""``fasth check``: compares the results of a device with the definition on the CPU in float64, and writes a report."""

from __future__ import annotations

import copy
import functools
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fasth import _files
from fasth.functional import householder, reflect
from fasth.nn import LinearOrthogonal, LinearSVD, LinearSymmetric
from fasth.reflections.plan import FORMS
from fasth.tools.device import environment, first_line
from fasth.tools.problems import PROBLEMS, Comparison, Problem, compare_all, from_definition, with_gradients
from fasth.tools.twins import definition_linear, orthogonality, perturbed

Comparisons = dict[str, Comparison]  # keys: "value", "gradient of x", …
Record = dict[str, Any]

DTYPES = ("float32", "bfloat16", "float16", "float64")

# Numbers of rows for each d. With 400 rows and d = 64 the weight is formed. The definition is sequential and slow: the
# large sizes have few rows, and only some kinds of layers.
ROWS = {
    64: (1, 7, 32, 200, 400),
    100: (1, 7, 32, 200),
    130: (1, 7, 32, 200),
    256: (1, 7, 32, 200),
    1024: (1, 7, 32),
    2048: (7,),
}
SIZES = [(d, rows) for d, numbers in ROWS.items() for rows in numbers]
LARGE = 1024
SCALES = (1e30, 1e-30)
ORTHOGONAL = (64, 512, 2048)
ORTHOGONALITY = 30.0  # the threshold of LAPACK's own tests

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "LinearSVD, square": lambda d, **options: LinearSVD(d, d, **options),
    "LinearSVD, wide": lambda d, **options: LinearSVD(d, d - d // 4, **options),
    "LinearSVD, tall": lambda d, **options: LinearSVD(d - d // 4, d, **options),
    "LinearSVD, rank": lambda d, **options: LinearSVD(d, d, rank=d // 8, **options),
    "LinearSVD, full": lambda d, **options: LinearSVD(d, d, reflectors="full", **options),
    "LinearSymmetric": lambda d, **options: LinearSymmetric(d, **options),
    "LinearOrthogonal, square": lambda d, **options: LinearOrthogonal(d, d, **options),
    "LinearOrthogonal, wide": lambda d, **options: LinearOrthogonal(d, d - d // 4, **options),
    "LinearOrthogonal, full": lambda d, **options: LinearOrthogonal(d, d, reflectors="full", **options),
}
LARGE_LAYERS = ("LinearSVD, square", "LinearSVD, rank", "LinearOrthogonal, square")


@dataclass(frozen=True)
class Check:
    name: str
    compare: Callable[[], Comparisons]


def checks(device: str, dtypes: Sequence[str] = DTYPES) -> list[Check]:
    """Lists all checks. Nothing is computed yet."""
    return [*_of_table(device, dtypes), *_of_sizes(device, dtypes), *_of_layers(device, dtypes),
            *_of_scales(device, dtypes), *_of_orthogonality(device, dtypes)]  # fmt: skip


def usable(device: str, dtypes: Sequence[str]) -> list[str]:
    """Returns the dtypes in which the device can multiply matrices."""

    def multiplies(dtype: str) -> bool:
        try:
            I = torch.eye(2, dtype=getattr(torch, dtype), device=device)
            return bool((I @ I).sum().item() == 2)
        except Exception:  # the type of the error depends on the device
            return False

    return [dtype for dtype in dtypes if multiplies(dtype)]


def run(device: str, chosen: Sequence[Check], out: Path) -> int:
    """Runs the checks, writes the report, and returns the exit code: 0, or 1 if one failed, or 130 if interrupted."""
    about, interrupted = environment(device), False
    records: list[Record] = []
    _files.write(out, _report(about, records, interrupted))  # an unwritable file is an error before the work, not after
    print(f"{len(chosen)} checks on {about['device']}", flush=True)
    try:
        for i, check in enumerate(chosen):
            _show_progress(f"[{i}/{len(chosen)}] {check.name}")
            records.append(perform(check))
    except KeyboardInterrupt:
        interrupted = True
    _show_progress("")
    _files.write(out, _report(about, records, interrupted))
    failed = _failed(records)
    for record in failed:
        print(f"failed: {record['name']}: {record['message']}")
    if interrupted:
        print(f"Interrupted after {len(records)} of {len(chosen)} checks")
    print(f"{len(records) - len(failed)} checks passed, {len(failed)} failed")
    print(f"Written to {out}: send this file with a report")
    return 130 if interrupted else 1 if failed else 0


def perform(check: Check) -> Record:
    """Runs one check. The record has its name, status, largest error relative to its tolerance, message and time."""
    start = time.perf_counter()
    record: Record = {"name": check.name, "status": "failed", "error": None, "tolerance": None, "message": ""}
    try:
        found = check.compare()
        worst = max(found.values(), key=_badness)
    except Exception as error:  # the other checks still run
        record["message"] = f"{type(error).__name__}: {first_line(error)}"
        record["traceback"] = traceback.format_exc()[-2000:]
    else:
        record["status"] = "passed" if worst.close else "failed"
        record["error"] = worst.error if math.isfinite(worst.error) else None  # JSON has no NaN
        record["tolerance"] = worst.tolerance
        record["message"] = "; ".join(f"{what}: {comparison}" for what, comparison in found.items())
    record["seconds"] = round(time.perf_counter() - start, 4)
    return record


def _failed(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["status"] == "failed"]


def _badness(comparison: Comparison) -> tuple[bool, float]:
    ratio = comparison.error / comparison.tolerance
    return not comparison.close, math.inf if math.isnan(ratio) else ratio


def _report(environment: dict[str, Any], records: Sequence[Record], interrupted: bool) -> str:
    """JSON with a line for each check."""
    failed = len(_failed(records))
    seconds = round(sum(record["seconds"] for record in records), 1)
    found = {"passed": len(records) - failed, "failed": failed, "interrupted": interrupted, "seconds": seconds}
    head = json.dumps({"environment": environment, **found, "checks": []}, indent=1, ensure_ascii=False)
    lines = ",\n  ".join(json.dumps(record, ensure_ascii=False) for record in records)
    return head.removesuffix("]\n}") + f"\n  {lines}\n ]\n}}\n"


def _show_progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{line[:78]}", end="", file=sys.stderr, flush=True)


# The table of problems.


def _of_table(device: str, dtypes: Sequence[str]) -> Iterator[Check]:
    for problem, form, transpose, dtype in product(PROBLEMS, FORMS, (False, True), dtypes):
        if form != "compact" or len(problem.V_shape) == 2:
            name = _name(f"table: {problem.name}", form, transpose, dtype)
            yield Check(name, partial(_compare_problem, problem, form, transpose, getattr(torch, dtype), device))


def _compare_problem(problem: Problem, form: str, transpose: bool, dtype: torch.dtype, device: str) -> Comparisons:
    x, V = problem.draw(dtype, device)
    actual = with_gradients(_multiplied(form, transpose, problem.block_size), x, V)
    assert all(t.dtype == dtype for t in actual), f"dtypes {[t.dtype for t in actual]}, not {dtype}"
    x, V = (t.detach().cpu().requires_grad_() for t in (x, V))
    expected = with_gradients(_defined(form, transpose), x, V)
    if form == "compact":  # whose diagonal has signs, and a gradient that keeps them
        actual = *actual[:2], actual[2].triu(1)
    return compare_all(tuple(t.detach().cpu() for t in actual), expected, _written_out(V, form))


def _multiplied(form: str, transpose: bool, block_size: int | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    if form == "compact":
        return lambda x, V: reflect(x, V, form, transpose=transpose, block_size=block_size)
    return lambda x, V: householder(x, V, transpose=transpose, triangular=form == "triangular", block_size=block_size)


def _defined(form: str, transpose: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, V: from_definition(x, _written_out(V, form), transpose=transpose)


def _written_out(V: Tensor, form: str) -> Tensor:
    """Converts reflectors of any form to full reflectors."""
    if form == "compact":
        return V.triu(1) + torch.eye(*V.shape, dtype=V.dtype, device=V.device)
    return V.triu() if form == "triangular" else V


def _name(start: str, form: str, transpose: bool, dtype: str) -> str:
    return f"{start}, {form}{', transpose' if transpose else ''}, {dtype}"


# Each size, compared by norms. The numbers are exact in every dtype, so that all dtypes share one reference.


def _of_sizes(device: str, dtypes: Sequence[str]) -> Iterator[Check]:
    for (d, rows), form, transpose in product(SIZES, FORMS, (False, True)):
        if d < LARGE or transpose == (form == "triangular"):
            for dtype in dtypes:
                name = _name(f"d = {d}, {rows} rows", form, transpose, dtype)
                yield Check(name, partial(_compare_size, d, rows, form, transpose, getattr(torch, dtype), device))


def _compare_size(d: int, rows: int, form: str, transpose: bool, dtype: torch.dtype, device: str) -> Comparisons:
    x, V, g, expected = _size(d, rows, form, transpose)
    actual = _step(_multiplied(form, transpose), [t.to(device, dtype) for t in (x, V)], g.to(device, dtype))
    return _compare_norms({"x": x, "V": V}, g, expected, actual)


@functools.lru_cache(maxsize=1)
def _size(d: int, rows: int, form: str, transpose: bool) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Returns x: (rows, d), V: (d, d), the gradient of the output, and the expected results of a step."""
    generator = torch.Generator().manual_seed(d + rows)
    x, V, g = (_rounded(torch.randn(n, d, dtype=torch.float64, generator=generator)) for n in (rows, d, rows))
    V.fill_diagonal_(1)  # without it the last triangular reflectors are short, and their gradients long
    return x, V, g, _step(_defined(form, transpose), [x, V], g)


def _rounded(t: Tensor) -> Tensor:
    """Rounds to values that every dtype represents exactly."""
    return t.to(torch.bfloat16).to(torch.float16).to(t.dtype)


def _step(
    function: Callable[..., Tensor], arguments: Sequence[Tensor], g: Tensor, parameters: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Returns the output and the gradients of the arguments and the parameters."""
    arguments = [t.detach().requires_grad_() for t in arguments]
    out = function(*arguments)
    return out.detach(), *torch.autograd.grad(out, [*arguments, *parameters], g)


def _compare_norms(
    tensors: dict[str, Tensor], g: Tensor, expected: Sequence[Tensor], actual: Sequence[Tensor]
) -> Comparisons:
    """Compares in the Frobenius norm. A gradient may cancel, but not below the rounding of ‖output‖·‖g‖/‖tensor‖."""
    out, *gradients = expected
    size = out.norm() * g.norm()
    found = {"value": _relative(actual[0], out, out.norm())}
    for (name, tensor), t, reference in zip(tensors.items(), actual[1:], gradients, strict=True):
        found[f"gradient of {name}"] = _relative(t, reference, torch.maximum(reference.norm(), size / tensor.norm()))
    return found


def _relative(actual: Tensor, expected: Tensor, scale: Tensor) -> Comparison:
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    error = ((actual.detach().cpu().double() - expected).norm() / scale).item()
    tolerance = _tolerance(actual.dtype)
    return Comparison(error, tolerance, error <= tolerance)


def _tolerance(dtype: torch.dtype) -> float:
    """Tolerance of docs/precision.md: smaller dtypes compute in float32, and round the result."""
    computed = torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps
    return 64 * computed + 8 * torch.finfo(dtype).eps


# Layers.


def _of_layers(device: str, dtypes: Sequence[str]) -> Iterator[Check]:
    for kind, (d, rows) in product(LAYERS, SIZES):
        if d < LARGE or kind in LARGE_LAYERS:
            bias = rows in (7, 200)
            for dtype in dtypes:
                name = f"{kind}, d = {d}, {rows} rows{', bias' if bias else ''}, {dtype}"
                yield Check(name, partial(_compare_layer, kind, d, rows, bias, getattr(torch, dtype), device))


def _compare_layer(kind: str, d: int, rows: int, bias: bool, dtype: torch.dtype, device: str) -> Comparisons:
    layer, x, g, expected = _layer(kind, d, rows, bias)
    named = {name: p.detach() for name, p in layer.named_parameters() if p.requires_grad}
    layer = copy.deepcopy(layer).to(device, dtype)
    actual = _step(layer, [x.to(device, dtype)], g.to(device, dtype), _trained(layer))
    return _compare_norms({"x": x, **named}, g, expected, actual)


@functools.lru_cache(maxsize=1)
def _layer(kind: str, d: int, rows: int, bias: bool) -> tuple[nn.Module, Tensor, Tensor, tuple[Tensor, ...]]:
    """Returns the layer in float64 on the CPU, x, the gradient of the output, and the expected results of a step."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(d + rows)
        layer = perturbed(LAYERS[kind](d, bias=bias, init="identity", dtype=torch.float64))
        for p in layer.parameters():
            p.copy_(_rounded(p))
        x, g = (_rounded(torch.randn(rows, n, dtype=p.dtype)) for n in (layer.in_features, layer.out_features))
    return layer, x, g, _step(partial(definition_linear, layer), [x], g, _trained(layer))


def _trained(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer.parameters() if p.requires_grad]


# Reflectors of any length, and orthogonality.


def _of_scales(device: str, dtypes: Sequence[str]) -> Iterator[Check]:
    dtype = torch.float32
    for scale, form, transpose in product(SCALES if "float32" in dtypes else (), FORMS, (False, True)):
        problem = Problem("scaled", (7, 70), (70, 70), change_V=partial(torch.mul, other=scale))
        name = _name(f"V times {scale:g}", form, transpose, "float32")
        yield Check(name, partial(_compare_problem, problem, form, transpose, dtype, device))


def _of_orthogonality(device: str, dtypes: Sequence[str]) -> Iterator[Check]:
    for d, dtype in product(ORTHOGONAL, dtypes):
        yield Check(f"orthogonality, d = {d}, {dtype}", partial(_orthogonality, d, getattr(torch, dtype), device))


def _orthogonality(d: int, dtype: torch.dtype, device: str) -> Comparisons:
    """Compares ‖QᵀQ − I‖₁ / (d·eps) with LAPACK's threshold."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(d)
        layer = perturbed(LinearOrthogonal(d, d, bias=False, init="identity", dtype=torch.float64))
        error = orthogonality(layer.to(device, dtype).weight.cpu())
    return {"orthogonality": Comparison(error, ORTHOGONALITY, error <= ORTHOGONALITY)}
