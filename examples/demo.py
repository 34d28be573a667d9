"""Train an orthogonal matrix: recover a rotation from noisy pairs (x, x Qᵀ + noise) by gradient descent.

The least-squares answer is known in closed form (orthogonal Procrustes), so there is something to be right about.
Run: make demo, or python examples/demo.py --help
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import fasth
from fasth.reflections import definition


def draw_reflectors(d: int) -> Tensor:
    """d triangular reflectors v = x + sign(x₁)‖x‖e₁ of Gaussian x: Q is Haar-distributed up to its columns' signs."""
    x = torch.randn(d, d).triu()
    return x + torch.diag(torch.copysign(x.norm(dim=-1), x.diagonal()))


def dense(V: Tensor) -> Tensor:
    return fasth.householder(torch.eye(V.shape[-1], dtype=V.dtype), V, triangular=True).mT


def train(x: Tensor, y: Tensor, V: Tensor, steps: int, console: Console) -> None:
    """min ‖x Qᵀ − y‖² over V. Nothing projects Q back: it is orthogonal at every step, whatever V is."""
    optimizer = torch.optim.Adam([V], lr=0.1, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.5f}"), TimeElapsedColumn()
    with Progress(TextColumn("training"), *columns, console=console) as progress:
        task = progress.add_task("", total=steps, loss=float("nan"))
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (fasth.householder(x, V, triangular=True) - y).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress.update(task, advance=1, loss=loss.item())


def differences(x: Tensor, V: Tensor, dtype: torch.dtype) -> list[float]:
    """Largest difference of value, gradient of x and of V from the definition's in float64, per largest entry."""
    x, V, g = (t.detach().to(dtype) for t in (x, V, torch.randn_like(x)))

    def value_and_gradients(function: Callable[..., Tensor], *arguments: Tensor) -> tuple[Tensor, ...]:
        x, V, g = (t.clone().requires_grad_() for t in arguments)
        out = function(x, V, triangular=True)
        return out, *torch.autograd.grad(out, (x, V), g)

    ours = value_and_gradients(fasth.householder, x, V, g)
    exact = value_and_gradients(definition.householder, x.double(), V.double(), g.double())
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, exact, strict=True)]


def milliseconds_per_step(d: int, rows: int = 32, rounds: int = 100) -> dict[str, float]:
    """Medians of forward and both gradients. The methods take turns, so that a busy machine slows all alike."""
    x, V, g = torch.randn(rows, d, requires_grad=True), draw_reflectors(d).requires_grad_(), torch.randn(rows, d)
    linear = nn.Linear(d, d, bias=False)
    methods: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "nn.Linear": (lambda: linear(x), linear.weight),
        "triangular": (lambda: fasth.householder(x, V, triangular=True), V),
        "full": (lambda: fasth.householder(x, V), V),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(rounds + 5):
        for name, (forward, weight) in methods.items():
            start = time.perf_counter()
            torch.autograd.grad(forward(), (x, weight), g)
            if turn >= 5:  # the first few warm up
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(measured) for name, measured in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("size", 64), ("pairs", 512), ("steps", 1500), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--noise", type=float, default=0.1, help="standard deviation, default 0.1")
    options = parser.parse_args()
    if options.size < 2:
        parser.error(f"--size should be at least 2, for there to be a rotation; got {options.size}")
    d, console = options.size, Console()
    torch.manual_seed(options.seed)

    # A reflection has determinant −1, so d nonzero reflectors make Q with determinant (−1)^d and no others: a rotation
    # for even d. No descent crosses over, so the truth is drawn as a product of just as many reflections, and in the
    # same way: with other signs of its columns it can be reached too, but may take more steps.
    truth = dense(draw_reflectors(d))
    x = torch.randn(options.pairs, d)
    y = x @ truth.mT + options.noise * torch.randn(options.pairs, d)
    U, _, Wt = torch.linalg.svd(y.double().mT @ x.double())
    procrustes = U @ Wt

    V = draw_reflectors(d)
    start = dense(V)
    train(x, y, V.requires_grad_(), options.steps, console)
    Q = dense(V.detach())

    def norm(difference: Tensor) -> str:
        return f"{torch.linalg.matrix_norm(difference.double()).item():.2e}"

    errors = Table("Frobenius norm", "at the start", "trained", "closed form", title=f"Q: ({d}, {d}), float32")
    errors.add_row("Q − truth", norm(start - truth), norm(Q - truth), norm(procrustes - truth))
    errors.add_row("Q − closed form", norm(start - procrustes), norm(Q - procrustes), "")
    errors.add_row("QᵀQ − I", *(norm(A.double().mT @ A.double() - torch.eye(d)) for A in (start, Q, procrustes)))

    exactness = Table(
        "", "value", "gradient of x", "gradient of V", title="difference from the definition, per largest entry"
    )
    for dtype in (torch.float64, torch.float32):
        exactness.add_row(str(dtype).removeprefix("torch."), *(f"{e:.1e}" for e in differences(x, V, dtype)))

    speed = Table("32 rows, float32", "nn.Linear", "triangular", "full", title="milliseconds per training step")
    for size in (64, 512):
        times = milliseconds_per_step(size)
        base = times["nn.Linear"]
        speed.add_row(
            f"d = {size}", f"{base:.3f}", *(f"{times[m]:.3f} ({times[m] / base:.1f}×)" for m in list(times)[1:])
        )
    for table in (errors, exactness, speed):
        console.print(table)
    console.print(f"torch {torch.__version__}, threads: {torch.get_num_threads()}", style="dim")


if __name__ == "__main__":
    main()
