"""Watching singular values while a small network trains: the table, the picture and, if asked for, TensorBoard.

The network learns a function of few of its inputs. A free spectrum spreads, a bounded one stays within its bounds, and
an orthogonal layer stays orthogonal; nothing is decomposed to see that.

Run: python examples/spectra.py [--out build/spectra.png] [--tensorboard DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import fasth

STEPS, BATCH = 600, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/spectra.png"), help="the picture")
    parser.add_argument("--tensorboard", type=Path, help="a directory to log to")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        fasth.LinearSVD(64, 64),
        nn.Tanh(),
        fasth.LinearSVD(64, 64, spectrum=fasth.spectrum.between(0.5, 1.5)),
        nn.Tanh(),
        fasth.LinearOrthogonal(64, 64),
        nn.Tanh(),
        nn.Linear(64, 1),
    )
    before = fasth.spectra(model)
    train(model, writer_to(arguments.tensorboard))
    after = fasth.spectra(model)
    print(after)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for ax, spectra, title in zip(
        figure.subplots(1, 2, sharey=True), (before, after), ("at first", f"after {STEPS} steps"), strict=True
    ):
        spectra.plot(ax).set(title=title)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=120)
    print(f"The picture is in {arguments.out}.")


def train(model: nn.Module, writer: object | None) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(STEPS):
        x = torch.randn(BATCH, 64)
        y = (2 * x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3].abs()
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if writer is not None and step % 20 == 0:
            fasth.spectra(model).log(writer, step)


def writer_to(directory: Path | None) -> object | None:
    if directory is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(directory)


if __name__ == "__main__":
    main()
