"""The true spectral norms of a critic's layers while it trains: ``torch.nn.utils.parametrizations.spectral_norm``,
which estimates the norm by power iteration and divides by the estimate, beside layers that hold their singular values.

The critic f, an MLP with ReLU, tells digits from digits whose pixels were shuffled among images: it maximises
E f(digits) − E f(shuffled), which is a lower bound of their Wasserstein distance if f has a Lipschitz constant of 1.
After every forward pass of the training, and with the weights that it used, each layer is decomposed in float64.

Run: python benchmarks/spectral_norm.py --help
"""

from __future__ import annotations

import argparse
import statistics
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import track
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import fasth
from fasth import _files
from fasth.tools.environment import describe
from fasth.tools.reproduce.tables import Table, markdown
from fasth.tools.timing import compare

OUT = Path(__file__).parent / "spectra" / "norms.md"
SIZES = (64, 128, 128, 128, 1)
BATCH, FIRST = 64, 10  # the norms of the first steps are those of the start
NormedLayer = Callable[[int, int], nn.Module]


def by_torch(inputs: int, outputs: int, iterations: int) -> nn.Module:
    return spectral_norm(nn.Linear(inputs, outputs), n_power_iterations=iterations)


LAYERS: dict[str, NormedLayer] = {
    "plain": nn.Linear,
    "`spectral_norm`": partial(by_torch, iterations=1),
    "`spectral_norm`, 5 iterations": partial(by_torch, iterations=5),
    "**`normalized()`**": partial(fasth.LinearSVD, spectrum=fasth.spectrum.normalized(), init="linear"),
    "**`between(0, 1)`**": partial(fasth.LinearSVD, spectrum=fasth.spectrum.between(0, 1), init="linear"),
    "**`LinearOrthogonal`**": fasth.LinearOrthogonal,
}
OURS = [name for name in LAYERS if name.startswith("**")]


class Trained(NamedTuple):
    norms: Tensor  # (steps, layers)
    distance: float  # E f(digits) − E f(shuffled), on images that it was not trained with


def critic(new: NormedLayer) -> nn.Sequential:
    layers = [module for sizes in pairwise(SIZES) for module in (new(*sizes), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Digits to train with and to test with, from 0 to 1: (n, 64)."""
    pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    training, test = pixels[torch.randperm(len(pixels), generator=generator)].split((1400, len(pixels) - 1400))
    return training, test


def shuffled(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Each pixel from an image of its own: its distribution stays, and what the pixels say of each other is lost."""
    return pixels.gather(0, torch.rand(pixels.shape, generator=generator).argsort(0))


@torch.no_grad()
def true_norms(model: nn.Sequential) -> list[float]:
    """‖W‖₂ of the weights that the last forward pass used: in eval mode torch does not iterate."""
    model.eval()
    weights = [layer.weight for layer in model if hasattr(layer, "weight")]
    model.train()
    return [torch.linalg.matrix_norm(weight.double(), 2).item() for weight in weights]


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(fasth.param_groups(model, lr=rate, optimizer=torch.optim.Adam))


def differentiate(model: nn.Module, real: Tensor, fake: Tensor) -> None:
    model.zero_grad()
    of_real, of_fake = model(torch.cat((real, fake))).chunk(2)
    (of_fake.mean() - of_real.mean()).backward()


def train(new: NormedLayer, seed: int, steps: int, rate: float) -> Trained:
    torch.manual_seed(seed)
    model, generator = critic(new), torch.Generator().manual_seed(seed)
    training, test = images(generator)
    optimizer, norms = optimizer_of(model, rate), []
    for _ in range(steps):
        real = training[torch.randint(len(training), (BATCH,), generator=generator)]
        differentiate(model, real, shuffled(real, generator))
        norms.append(true_norms(model))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        distance = (model(test).mean() - model(shuffled(test, generator)).mean()).item()
    return Trained(torch.tensor(norms, dtype=torch.float64), distance)


def seconds_of_steps(rounds: int) -> dict[str, float]:
    """Lower decile of each critic's step times, in turns: a busy machine interrupts longer steps more often."""
    real, fake = torch.rand(2, BATCH, SIZES[0])

    def step_of(model: nn.Module) -> Callable[[], None]:
        optimizer = optimizer_of(model, 1e-3)

        def step() -> None:
            differentiate(model, real, fake)
            optimizer.step()

        return step

    calls = {name: step_of(critic(new)) for name, new in LAYERS.items()}
    timings = compare(calls, device=real.device, rounds=rounds)
    return {timing.name: timing.quantile(0.1) for timing in timings}


def table(found: dict[str, list[Trained]], seconds: dict[str, float], rate: float) -> Table:
    """The largest norms after the first steps, of all seeds."""
    rows = []
    for name, runs in found.items():
        norms = torch.stack([run.norms for run in runs])[:, FIRST:]  # (seeds, steps, layers)
        largest = [*norms.amax((0, 1)).tolist(), norms.prod(-1).max().item(), norms[:, -1].max().item()]
        time = f"{seconds[name] / seconds['plain']:.1f}"
        rows.append([name, *map(number, largest), mean_and_spread([run.distance for run in runs]), time])
    layers = [f"{i}" for i in range(1, len(SIZES))]
    return Table(f"Adam at {rate:g}", ["", *layers, "product", "at the end", "distance", "time"], rows)


def number(norm: float) -> str:
    return f"{norm:.3f}" if norm < 10 else f"{norm:.0f}" if norm < 1e4 else f"{norm:.1e}"


def mean_and_spread(values: Sequence[float]) -> str:
    mean = statistics.mean(values)
    if len(values) < 2 or mean >= 100:
        return f"{mean:.1e}" if mean >= 100 else f"{mean:.2f}"
    return f"{mean:.2f} ± {statistics.stdev(values):.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help=f"more than {FIRST}")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 1e-2])
    parser.add_argument("--out", type=Path, default=OUT, help="default benchmarks/spectra/norms.md")
    options = parser.parse_args(arguments)
    if options.steps <= FIRST or options.seeds < 1:
        parser.error(f"there should be more than {FIRST} steps and a seed; got {options.steps} and {options.seeds}")
    seconds, tables, excess = seconds_of_steps(rounds=10 * options.seeds), [], 0.0
    for rate in options.rates:
        found: dict[str, list[Trained]] = {name: [] for name in LAYERS}
        runs = [(seed, name) for seed in range(options.seeds) for name in LAYERS]
        for seed, name in track(runs, description=f"rate {rate:g}"):
            found[name].append(train(LAYERS[name], seed, options.steps, rate))
        ours = torch.stack([run.norms for name, runs in found.items() if name in OURS for run in runs])
        excess = max(excess, ours.max().item() - 1)
        tables.append(markdown(table(found, seconds, rate)))
    found_at = describe()
    note = (
        f"The true spectral norms of the layers of {'-'.join(map(str, SIZES))}, the largest in steps {FIRST} to "
        f"{options.steps} of all seeds "
        f"({options.seeds}). *product*: the largest product over the layers, a bound of the Lipschitz constant. *at "
        "the end*: the largest norm of a layer at the last step. No layer of fasth was above 1 by more than "
        f"{excess:.0e}, at any step. *distance*: mean ± standard deviation over seeds. *time*: that of a step, as a "
        f"multiple of plain layers', in turns. {found_at['cpu']}, threads: {found_at['threads']}, torch "
        f"{found_at['versions']['torch']}."
    )
    report = "\n\n".join([*tables, textwrap.fill(note, 120)])
    print(report)
    _files.write(options.out, report + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)  # layers this small gain nothing by more
    main()
