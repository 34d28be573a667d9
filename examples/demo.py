"""What if a neural network had SVDs? A network for handwritten digits twice: plain, and converted by ``fasth.to_svd``.

Both compute the same at the start and are trained on the same batches. Then: how well they do and what a step costs,
what each layer knows of itself without any decomposition, how small the network can be made, and a picture of its
singular values.

Run: make demo, or python examples/demo.py --help
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn

import fasth
from fasth.tools.environment import describe

# The usual setting for both networks, AdamW with its defaults: none was chosen for this demo.
BATCH, LEARNING_RATE, WEIGHT_DECAY = 32, 1e-3, 0.01
EPOCHS_MORE = 2  # for a network that was compressed
SIZES = {"seeds": (1, 3, 1), "width": (16, 256, 64), "epochs": (1, 20, 8)}  # least, default, quick
PICTURE = Path(__file__).parents[1] / "build" / "demo" / "spectra.png"


class Digits(NamedTuple):
    images: Tensor  # (n, 64): the 8×8 pixels, from 0 to 1
    labels: Tensor  # (n,)


@dataclass
class Trained:
    """Both networks after training, what they were trained and are tested on, and what was seen on the way."""

    plain: nn.Module
    svd: nn.Module
    training: Digits
    test: Digits
    difference_at_start: float  # the largest, of their outputs
    spectra_at_start: list[Tensor]
    seconds: dict[str, list[float]]  # of each step of "plain" and of "SVD"


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def split_digits() -> tuple[Digits, Digits]:
    """Four fifths to train on and one fifth to test on, at random, of the 1797 images that scikit-learn ships."""
    pixels, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(classes)
    training, test = torch.randperm(len(labels)).tensor_split([len(labels) * 4 // 5])
    return Digits(images[training], labels[training]), Digits(images[test], labels[test])


def train_both(seed: int, width: int, epochs: int, after_epoch: Callable[[str], None]) -> Trained:
    torch.manual_seed(seed)
    training, test = split_digits()
    plain = network(width)
    svd = fasth.to_svd(plain)  # a copy, in which every Linear is a LinearSVD
    difference = (plain(test.images) - svd(test.images)).abs().max().item()
    spectra_at_start = spectra(svd)
    seconds = train({"plain": plain, "SVD": svd}, training, epochs, after_epoch)
    return Trained(plain, svd, training, test, difference, spectra_at_start, seconds)


def train(
    models: dict[str, nn.Module], data: Digits, epochs: int, after_epoch: Callable[[str], None]
) -> dict[str, list[float]]:
    """Trains all models on the same batches, and returns the seconds of each step."""
    batches = len(data.labels) // BATCH
    optimizers: dict[str, torch.optim.Optimizer] = {}
    schedules: dict[str, torch.optim.lr_scheduler.LRScheduler] = {}
    for name, model in models.items():
        # Plain layers get the rate as it is, and singular values the one that they need.
        groups = fasth.param_groups(model, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        optimizers[name] = torch.optim.AdamW(groups)
        schedules[name] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[name], epochs * batches)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    losses: dict[str, float] = {}
    order = list(models)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.labels))[: batches * BATCH].split(BATCH):
            images, labels = data.images[batch], data.labels[batch]
            order.reverse()  # alternates the order, as the second network finds the batch in the cache
            for name in order:
                start = time.perf_counter()
                losses[name] = training_step(models[name], optimizers[name], images, labels)
                seconds[name].append(time.perf_counter() - start)
                schedules[name].step()
        after_epoch(", ".join(f"{name} {losses[name]:.4f}" for name in models))
    return seconds


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def answers(model: nn.Module, images: Tensor) -> Tensor:
    return model.eval()(images).argmax(-1)


def accuracy(model: nn.Module, data: Digits) -> float:
    """Accuracy in percent."""
    return 100 * (answers(model, data.images) == data.labels).double().mean().item()


def agreement(run: Trained) -> float:
    """Percentage of the test images to which both networks give the same answer."""
    return accuracy(run.svd, Digits(run.test.images, answers(run.plain, run.test.images)))


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def spectra(model: nn.Module) -> list[Tensor]:
    """Each layer's singular values, descending: those of an SVD network are at hand, a plain one is decomposed."""
    known = [layer.singular_values for layer in fasth.spectra(model).values()]
    plain = [layer.weight.detach() for layer in model.modules() if isinstance(layer, nn.Linear)]
    return known + [torch.linalg.svdvals(W) for W in plain]


# Each from W = U Σ Vᵀ as its factors, and by torch.linalg from the dense W; B are columns to multiply by W⁻¹.
Quantities = dict[str, tuple[Callable[[fasth.SVD, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]]
OF_ANY_LAYER: Quantities = {
    "spectral norm": (lambda svd, B: svd.norm(2), lambda W, B: torch.linalg.matrix_norm(W, 2)),
    "condition number": (lambda svd, B: svd.cond(), lambda W, B: torch.linalg.cond(W)),
}
OF_SQUARE_LAYERS: Quantities = {
    "log |determinant|": (lambda svd, B: svd.logabsdet(), lambda W, B: torch.linalg.slogdet(W).logabsdet),
    f"inverse, {BATCH} columns": (lambda svd, B: svd.solve(B), lambda W, B: torch.linalg.solve(W, B)),
}


class Fact(NamedTuple):
    """A quantity as the layer knows it, as torch.linalg computes it, and as torch.linalg computes it in float64."""

    name: str
    known: Tensor
    computed: Tensor
    exact: Tensor
    seconds_known: float
    seconds_computed: float

    def error(self, found: Tensor) -> float:
        return float(torch.dist(found.double(), self.exact) / self.exact.norm())


@torch.no_grad()
def facts(layer: fasth.LinearSVD, rounds: int = 20) -> list[Fact]:
    W, exact_W = layer.weight, copy.deepcopy(layer).double().weight  # formed here, so not in torch.linalg's time
    B = torch.randn(layer.out_features, BATCH)

    def fact(name: str, svd_call: Callable[..., Tensor], dense_call: Callable[..., Tensor]) -> Fact:
        def known() -> Tensor:
            return svd_call(layer.svd, B)

        def computed() -> Tensor:
            return dense_call(W, B)

        seconds = seconds_of_each(known, computed, rounds=rounds)
        return Fact(name, known(), computed(), dense_call(exact_W, B.double()), *seconds)

    quantities = OF_ANY_LAYER | (OF_SQUARE_LAYERS if layer.in_features == layer.out_features else {})
    return [fact(name, *ways) for name, ways in quantities.items()]


def seconds_of_each(*functions: Callable[[], object], rounds: int) -> list[float]:
    """Times single calls of each function, in turns, so that a busy machine slows all alike."""
    readings: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, own in zip(functions, readings, strict=True):
            function()  # not timed: it finds the caches full of another one's data
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return [undisturbed(own) for own in readings]


def undisturbed(readings: Sequence[float]) -> float:
    """The lower decile. On a busy machine the median of what lasts longer is also interrupted more often."""
    return statistics.quantiles(readings, n=10, method="inclusive")[0]


class Compressed(NamedTuple):
    """Means over the runs."""

    rank: int
    parameters: float
    accuracy: float
    trained_on: float  # the accuracy after EPOCHS_MORE of training


def compressed(runs: Sequence[Trained], width: int) -> list[Compressed]:
    """Cut down to the largest singular values of each layer, and then trained on as what they are: thin SVDs."""
    found = []
    for rank in (width // 4, width // 8, width // 16):
        # The report is made but not shown: the last layer has ten singular values, and keeps them.
        models = [fasth.compress(run.svd, rank=rank, trainable=True, report=[]) for run in runs]
        size, accuracy = statistics.mean(map(count_parameters, models)), mean_accuracy(models, runs)
        for model, run in zip(models, runs, strict=True):
            train({"SVD": model.train()}, run.training, EPOCHS_MORE, lambda losses: None)
        found.append(Compressed(rank, size, accuracy, mean_accuracy(models, runs)))
    return found


def mean_accuracy(models: Sequence[nn.Module], runs: Sequence[Trained]) -> float:
    return statistics.mean(accuracy(model, run.test) for model, run in zip(models, runs, strict=True))


def side_by_side(runs: Sequence[Trained]) -> Table:
    table = new_table(f"Both networks; seeds: {len(runs)}", "", "plain", "SVD")
    models = [run.plain for run in runs], [run.svd for run in runs]
    for data in ("test", "training"):
        found = [
            [accuracy(m, getattr(run, data)) for m, run in zip(networks, runs, strict=True)] for networks in models
        ]
        table.add_row(f"{data} accuracy, %", *map(mean_and_range, found))
    table.add_row("parameters", *(f"{count_parameters(networks[0]):,}" for networks in models))
    steps = [[seconds for run in runs for seconds in run.seconds[name]] for name in ("plain", "SVD")]
    plain, svd = map(undisturbed, steps)
    table.add_row("training step, ms", f"{1e3 * plain:.2f}", f"{1e3 * svd:.2f} ({svd / plain:.2f} × plain)")
    inference = inference_seconds(runs[0])
    table.add_row(f"inference of {BATCH} images, ms", *(f"{1e3 * seconds:.3f}" for seconds in inference))
    table.add_row("outputs differ at the start by", "", f"{max(run.difference_at_start for run in runs):.0e}")
    table.add_row("same answers after training, %", "", mean_and_range([agreement(run) for run in runs]))
    return table


@torch.no_grad()
def inference_seconds(run: Trained) -> list[float]:
    plain, svd, images = run.plain.eval(), run.svd.eval(), run.test.images[:BATCH]
    with fasth.cached():
        return seconds_of_each(lambda: plain(images), lambda: svd(images), rounds=200)


def known_for_free(svd: nn.Module) -> Table:
    columns = "layer", "quantity", "value", "SVD\nerror", "linalg\nerror", "SVD\nms", "linalg\nms", "times\nfaster"
    table = new_table("What each trained layer knows, and torch.linalg computes", *columns)
    table.caption = (
        "Relative errors, against torch.linalg in float64. In float32 it starts from\n"
        "a dense weight that is rounded; forming that is not in its time."
    )
    for layer in svd.modules():
        if isinstance(layer, fasth.LinearSVD):
            for i, fact in enumerate(facts(layer)):
                table.add_row(
                    "" if i else f"{layer.in_features}→{layer.out_features}",
                    fact.name,
                    "" if fact.known.ndim else f"{fact.known:.5g}",
                    *(f"{fact.error(found):.0e}" for found in (fact.known, fact.computed)),
                    *(f"{1e3 * seconds:.3f}" for seconds in (fact.seconds_known, fact.seconds_computed)),
                    f"{fact.seconds_computed / fact.seconds_known:.1f}",
                )
    return table


def made_smaller(runs: Sequence[Trained], width: int) -> Table:
    title = "The SVD network compressed"
    table = new_table(title, "", "parameters", "of plain, %", "test accuracy, %", f"{EPOCHS_MORE} epochs later")
    plain = count_parameters(runs[0].plain)
    whole, best = count_parameters(runs[0].svd), mean_accuracy([run.svd for run in runs], runs)
    table.add_row("as trained", f"{whole:,}", f"{100 * whole / plain:.0f}", f"{best:.1f}", "")
    for rank, parameters, cut, trained_on in compressed(runs, width):
        size = f"{parameters:,.0f}", f"{100 * parameters / plain:.0f}"
        table.add_row(f"rank={rank}", *size, f"{cut:.1f}", f"{trained_on:.1f}")
    return table


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=f"\n{title}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "layer", "quantity") else "right", no_wrap=True)
    return table


def mean_and_range(values: Sequence[float]) -> str:
    spread = f" ({min(values):.1f}–{max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def draw(run: Trained, path: Path) -> None:
    """The singular values of each layer, before training and after it, in both networks."""
    curves: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
        "both networks before training": (run.spectra_at_start, {"color": "0.55", "linestyle": ":"}),
        "plain, trained": (spectra(run.plain), {"color": "#D55E00", "linestyle": "--"}),
        "SVD, trained": (spectra(run.svd), {"color": "#0072B2"}),
    }
    sizes = [(layer.in_features, layer.out_features) for layer in run.plain.modules() if isinstance(layer, nn.Linear)]
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, len(sizes), sharey=True)
    for i, (panel, (inputs, outputs)) in enumerate(zip(panels, sizes, strict=True)):
        for label, (found, style) in curves.items():
            panel.plot(range(1, len(found[i]) + 1), found[i], label=label, linewidth=2, **style)
        panel.set(title=f"layer {i + 1}: {inputs} → {outputs}", xlabel="index, largest first")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(bottom=0)  # of all panels, and now that they have their curves: it stops them from growing
    panels[0].set_ylabel("singular value σ")
    figure.suptitle("Singular values of a digit classifier's layers")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(curves), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def train_all(seeds: int, width: int, epochs: int, console: Console) -> list[Trained]:
    columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs, {task.description}")
    # Redrawn after each epoch and not by a thread of its own, which would run in the middle of a step that is timed.
    with Progress(*columns, TimeElapsedColumn(), console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=seeds * epochs)

        def after_epoch(losses: str) -> None:
            progress.update(task, advance=1, description=f"loss {losses}", refresh=True)

        return [train_both(seed, width, epochs, after_epoch) for seed in range(seeds)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    for name, (_, default, quick) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"default {default}, with --quick {quick}")
    parser.add_argument(
        "--picture", type=Path, default=PICTURE, help="where it is written; default build/demo/spectra.png"
    )
    options = parser.parse_args(arguments)
    sizes = {}
    for name, (least, default, quick) in SIZES.items():
        chosen = getattr(options, name)
        sizes[name] = chosen if chosen is not None else quick if options.quick else default
        if sizes[name] < least:
            parser.error(f"--{name} should be at least {least}; got {sizes[name]}")

    console = Console()
    runs = train_all(**sizes, console=console)
    console.print(side_by_side(runs), known_for_free(runs[0].svd), made_smaller(runs, sizes["width"]))
    draw(runs[0], options.picture)
    console.print(f"\nA picture of the singular values: {options.picture}", soft_wrap=True)
    machine = f"torch {torch.__version__}, compiled core: {describe()['core']}, threads: {torch.get_num_threads()}"
    console.print(f"{machine}\nTimes are lower deciles, taken in turns.", style="dim")


if __name__ == "__main__":
    main()
