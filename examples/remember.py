"""Copy memory: ten symbols, a hundred blanks, then the ten symbols again. Which net learns it, an LSTM or an RNN with
an SVD?

Both have 128 hidden units and see the same batches. The picture shows why one learns it and the other does not: how
much of the loss, at the end of the sequence, reaches the hidden state at each time step.

Run: python examples/remember.py, which takes half a minute
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor, nn

import fasth

SYMBOLS, RECALLED, BLANKS = 8, 10, 100
HIDDEN, STEPS, BATCH = 128, 600, 32
LENGTH, INPUTS = BLANKS + 2 * RECALLED, SYMBOLS + 2  # the inputs are a blank, the symbols and a mark
PICTURE = Path(__file__).parents[1] / "build" / "remember" / "gradients.png"


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ten symbols, blanks, a mark, and blanks to the end; and, as targets, blanks until the mark, then the symbols."""
    symbols = torch.randint(1, SYMBOLS + 1, (RECALLED, BATCH), generator=generator)
    x = torch.zeros(LENGTH, BATCH, dtype=torch.long)
    y = torch.zeros_like(x)
    x[:RECALLED], x[-RECALLED - 1], y[-RECALLED:] = symbols, SYMBOLS + 1, symbols
    return F.one_hot(x, INPUTS).float(), y


class Net(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(HIDDEN, SYMBOLS + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def train(net: Net, name: str) -> None:
    optimizer = torch.optim.Adam(fasth.param_groups(net, lr=1e-3))  # the rates that an SVD needs
    generator = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    for _ in track(range(STEPS), description=f"{name:9}"):
        x, y = batch(generator)
        out = net(x)
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    recalled = 100 * (out[-RECALLED:].argmax(-1) == y[-RECALLED:]).float().mean()
    print(f"{name}: {recalled:.0f} % recalled, {seconds:.0f} s; guessing is right in {100 / SYMBOLS:.1f} %")


def recall_loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """The loss of the symbols that have to be remembered."""
    return F.cross_entropy(net(x)[-RECALLED:].flatten(0, 1), y[-RECALLED:].flatten())


def main() -> None:
    torch.manual_seed(0)
    nets = {"nn.LSTM": Net(nn.LSTM(INPUTS, HIDDEN)), "RNNSVD": Net(fasth.RNNSVD(INPUTS, HIDDEN))}
    x, y = batch(torch.Generator().manual_seed(1))
    figure = Figure(figsize=(10, 4), layout="constrained")
    before, after = figure.subplots(1, 2, sharey=True)
    for name, net in nets.items():
        fasth.hidden_gradients(net, lambda net=net: recall_loss(net, x, y)).plot(before, label=name)
        train(net, name)
        fasth.hidden_gradients(net, lambda net=net: recall_loss(net, x, y)).plot(after, label=name)
    before.set(title="at the start", ylim=(1e-12, None))
    after.set(title=f"after {STEPS} steps", ylabel="")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=120)
    print(f"What reaches the hidden state at each time step: {PICTURE}")


if __name__ == "__main__":
    main()
