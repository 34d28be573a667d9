"""Fine-tuning with few parameters: a network that knows one task learns another, while most of it stays as it is.

A network is trained on handwritten digits and then adapted, with 200 labelled images, to one of two new tasks: the same
digits turned by a quarter, or five digits that it has not seen, which take over the outputs of the five that it has.
Every method has the same networks to start from, the same batches, rates and seeds. The best rate is chosen on
validation images, and shown is what the test images say: of the new task, and of the old one, after the adaptation.

Run: python examples/adapters.py --help
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn

import fasth
from fasth import _files, adapters
from fasth.tools.reproduce.tables import Table, markdown

WIDTH, RANK, REFLECTIONS, BATCH = 128, 4, 8, 32
PRETRAINING, ADAPTING, VALIDATION = 700, 200, 200  # images; the others are for the test
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)
SIZES = {"seeds": (1, 4, 1), "steps": (1, 150, 40)}  # least, default, quick
OUT = Path(__file__).parents[1] / "build" / "adapters"


class LoRA(nn.Module):
    """LoRA, for comparison: a frozen layer plus B A x, with B = 0 at the start."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.A = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(rank, layer.in_features), a=math.sqrt(5)))
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.A.mT @ self.B.mT

    def merged(self) -> nn.Linear:
        with torch.no_grad():
            self.layer.weight += self.B @ self.A
        return self.layer


def lora(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(*(LoRA(layer, RANK) if isinstance(layer, nn.Linear) else layer for layer in model))


def last_layer(model: nn.Sequential) -> nn.Module:
    model.requires_grad_(False)[-1].requires_grad_(True)
    return model


# Functions that turn a pre-trained network, possibly in place, into one that trains the method's parameters.
METHODS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "all weights": lambda model: model,
    "all weights, as SVDs": fasth.to_svd,
    "the last layer": last_layer,
    f"LoRA, rank {RANK}": lora,
    f"**thin SVD, rank {RANK}**": lambda model: adapters.add(model, "thin SVD", r=RANK),
    "**singular values**": lambda model: adapters.add(model, "singular values"),
    f"**{REFLECTIONS} reflections**": lambda model: adapters.add(model, "reflections", r=REFLECTIONS),
    f"**{REFLECTIONS // 2} reflections a side**": lambda model: adapters.add(
        model, "reflections", r=REFLECTIONS // 2, side="both"
    ),
    "**orthogonal**": lambda model: adapters.add(model, "orthogonal"),
}


def merged(model: nn.Module) -> nn.Module:
    """The adapted network with the layers that it had at first, and nothing beside them."""
    if isinstance(model, nn.Sequential) and isinstance(model[0], LoRA):
        return nn.Sequential(*(layer.merged() if isinstance(layer, LoRA) else layer for layer in model))
    return fasth.to_dense(adapters.remove(adapters.merge(model)))


class Digits(NamedTuple):
    images: Tensor  # (n, 64)
    labels: Tensor  # (n,)


class Data(NamedTuple):
    """The data of one seed. No image is in two parts, but the old task's test images may be in the new task's."""

    pretraining: Digits
    old_test: Digits
    adapting: Digits
    validation: Digits
    test: Digits


def turned(seed: int) -> Data:
    """The task of digits turned by a quarter, for a network trained on upright ones."""
    pixels, labels = _shuffled(seed)
    old, new = Digits(pixels.flatten(1), labels), Digits(pixels.rot90(dims=(1, 2)).flatten(1), labels)
    first, *rest = _split(old, PRETRAINING, ADAPTING, VALIDATION)
    return Data(first, rest[-1], *_split(new, PRETRAINING, ADAPTING, VALIDATION)[1:])


def unseen(seed: int) -> Data:
    """The task of the digits 5 to 9, for a network trained on 0 to 4: the output for 0 now means 5, and so on."""
    pixels, labels = _shuffled(seed)
    images = pixels.flatten(1)
    old, new = Digits(images[labels < 5], labels[labels < 5]), Digits(images[labels >= 5], labels[labels >= 5] - 5)
    return Data(*_split(old, PRETRAINING), *_split(new, ADAPTING, VALIDATION))


TASKS = {"turned": turned, "unseen": unseen}


def _shuffled(seed: int) -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(pixels, dtype=torch.float32).reshape(-1, 8, 8)[order] / 16, torch.tensor(labels)[order]


def _split(digits: Digits, *sizes: int) -> list[Digits]:
    parts = [*sizes, len(digits.labels) - sum(sizes)]
    return [Digits(*part) for part in zip(digits.images.split(parts), digits.labels.split(parts), strict=True)]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def train(model: nn.Module, data: Digits, rate: float, steps: int, seed: int) -> None:
    optimizer = torch.optim.Adam(fasth.param_groups(model, lr=rate, optimizer=torch.optim.Adam))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(data.labels), (BATCH,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(data.images[batch]), data.labels[batch]).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """Accuracy in percent."""
    return 100 * (model(data.images).argmax(-1) == data.labels).double().mean().item()


@dataclass
class Result:
    """The result of one adaptation, or, with the rate 0, of the network before it."""

    task: str
    method: str
    rate: float
    seed: int
    parameters: int  # that were trained
    validation: float
    new: float
    old: float
    merging_error: float = 0.0  # the largest change of an output by merging, relative to the largest output


def adapt(task: str, method: str, rate: float, seed: int, start: nn.Sequential, data: Data, steps: int) -> Result:
    torch.manual_seed(seed)  # for what an adapter draws
    model = METHODS[method](copy.deepcopy(start))
    if rate:
        train(model, data.adapting, rate, steps, seed)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    with torch.no_grad():
        apart = model(data.test.images)
        whole = merged(model)  # what is tested is what would be deployed
        together = whole(data.test.images)
        error = ((apart - together).abs().max() / apart.abs().max()).item()
    scores = (accuracy(whole, part) for part in (data.validation, data.test, data.old_test))
    return Result(task, method, rate, seed, trained, *scores, merging_error=error)


def run(seeds: int, steps: int, rates: Sequence[float], console: Console) -> list[Result]:
    results = []
    columns = TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(TASKS) * seeds * len(METHODS) * len(rates))
        for task, make_data in TASKS.items():
            for seed in range(seeds):
                data = make_data(seed)
                torch.manual_seed(seed)
                start = network()
                train(start, data.pretraining, 3e-3, 2 * steps, seed)
                results.append(adapt(task, "all weights", 0, seed, start, data, steps))
                for method in METHODS:
                    progress.update(bar, description=f"{task}, seed {seed}: {method.strip('*')}")
                    for rate in rates:
                        results.append(adapt(task, method, rate, seed, start, data, steps))
                        progress.advance(bar)
    return results


def best(results: Sequence[Result], task: str, method: str) -> list[Result]:
    """The results of the rate with the best mean on validation images."""
    own = [result for result in results if (result.task, result.method) == (task, method) and result.rate]
    rates = sorted({result.rate for result in own})
    of_rate = {rate: [result for result in own if result.rate == rate] for rate in rates}
    return max(of_rate.values(), key=lambda runs: statistics.mean(result.validation for result in runs))


def mean_and_spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def table(results: Sequence[Result], task: str) -> Table:
    before = [result for result in results if result.task == task and not result.rate]
    rows = [["before", "", *(mean_and_spread([getattr(r, part) for r in before]) for part in ("new", "old")), ""]]
    for method in METHODS:
        runs = best(results, task, method)
        scores = [mean_and_spread([getattr(r, part) for r in runs]) for part in ("new", "old")]
        rows.append([method, f"{runs[0].parameters:,}", *scores, f"{runs[0].rate:g}"])
    title = {"turned": "Digits turned by a quarter", "unseen": "Digits that the network has not seen"}[task]
    return Table(title, ["trained", "parameters", "new task, % ↑", "old task, % ↑", "rate"], rows)


def draw(results: Sequence[Result], path: Path) -> None:
    """Draws each method's accuracy on the new and the old task, with the spread over seeds."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    places = range(len(METHODS))
    for panel, task in zip(figure.subplots(1, len(TASKS), sharey=True), TASKS, strict=True):
        runs = [best(results, task, method) for method in METHODS]
        for part, color, face in (("old", "0.55", "none"), ("new", "#0072B2", "#0072B2")):
            scores = [[getattr(result, part) for result in own] for own in runs]
            means = [statistics.mean(own) for own in scores]
            spreads = [statistics.stdev(own) if len(own) > 1 else 0 for own in scores]
            style = {"fmt": "o", "color": color, "markerfacecolor": face, "capsize": 3}
            panel.errorbar(means, places, xerr=spreads, label=f"{part} task, adapted", **style)
            before = statistics.mean(getattr(r, part) for r in results if r.task == task and not r.rate)
            panel.axvline(before, color=color, linestyle=":", label=f"{part} task, before")
        panel.set(xlim=(0, 102), xlabel="test accuracy, %", title=table(results, task).title)
        panel.set_yticks(
            places, [f"{m.strip('*')}: {own[0].parameters:,}" for m, own in zip(METHODS, runs, strict=True)]
        )
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panel.invert_yaxis()  # of both
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    for name, (_, default, quick) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"default {default}, with --quick {quick}")
    parser.add_argument("--out", type=Path, default=OUT, help="a directory; default build/adapters")
    options = parser.parse_args(arguments)
    sizes = {}
    for name, (least, default, quick) in SIZES.items():
        chosen = getattr(options, name)
        sizes[name] = chosen if chosen is not None else quick if options.quick else default
        if sizes[name] < least:
            parser.error(f"--{name} should be at least {least}; got {sizes[name]}")
    results = run(**sizes, rates=RATES[1:4] if options.quick else RATES, console=Console())
    tables = [markdown(table(results, task)) for task in TASKS]
    error = max(result.merging_error for result in results)
    note = (
        f"Seeds: {sizes['seeds']}; steps of {BATCH} images: {sizes['steps']}; mean ± standard deviation. "
        f"The tested networks are merged; that changed no output by more than {error:.0e} of the largest."
    )
    report = "\n\n".join([*tables, textwrap.fill(note, 120)])
    print(report)
    _files.write(options.out / "table.md", report + "\n")
    draw(results, options.out / "adapters.png")
    print(f"\nThe table and a picture are in {options.out}.")


if __name__ == "__main__":
    torch.set_num_threads(1)  # layers this small gain nothing by more
    main()
