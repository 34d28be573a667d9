"""How far back in time a recurrent net learns: the gradient of the loss with respect to its states, at each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

from fasth.nn import cached
from fasth.nn.recurrent import Recurrent
from fasth.spectra import new_axes

__all__ = ["HiddenGradients", "hidden_gradients"]


def hidden_gradients(model: nn.Module, loss: Callable[[], Tensor]) -> HiddenGradients:
    """‖∂L/∂h_t‖ of every recurrent layer of ``model`` at every time t: how much the loss L changes with the state at t.

    Where it vanishes towards the first times, the net learns nothing from what happened then.

    Args:
        model: any module with layers of the kinds ``nn.RNN``, ``nn.LSTM``, ``nn.GRU``, ``RNNSVD``, ``LSTMSVD`` and
            ``GRUSVD``, or one of them. They should run in one direction, on padded sequences.
        loss: computes L, a scalar, by calling ``model``.

    Returns:
        The norms by the name of the layer: (time,) each. The norm is over the batch, over all layers of a stack and,
        in an LSTM, over h and c, which count as independent. The gradient is the whole one: through the output at t,
        and through all later states. Layers that are frozen, with all that comes before them, are left out.

    While L is computed, these layers run one time step at a time. The gradients of parameters stay as they are.

    Example:
        >>> rnn, x = fasth.RNNSVD(10, 64), torch.randn(100, 8, 10)
        >>> found = hidden_gradients(rnn, lambda: rnn(x)[0][-1].square().sum())
        >>> found[""].shape  # the layer is the model itself, so it has no name
        torch.Size([100])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` should be a torch.nn.Module; got {type(model).__name__}")
    if not callable(loss):
        raise TypeError(f"`loss` should be a function that computes the loss; got {type(loss).__name__}")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, (nn.RNNBase, Recurrent))}
    for name, layer in layers.items():
        if layer.bidirectional:
            raise ValueError(f"{_called(name)} should run in one direction; got bidirectional=True")
    seen: dict[str, list[list[Tensor]]] = {}
    with ExitStack() as stack:
        for context in (torch.enable_grad(), cached(), parametrize.cached()):
            stack.enter_context(context)
        for name, layer in layers.items():
            stack.enter_context(_Stepwise(name, layer, seen))
        value = loss()
    if not seen:
        found = f"got {type(model).__name__}, of which {', '.join(layers) or 'no layer'} is recurrent"
        raise ValueError(f"`loss` should call a recurrent layer of `model`, uncompiled; {found}")
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise ValueError(f"`loss` should return a scalar with a gradient; got {value!r}")
    return HiddenGradients(_norms(value, seen))


def _norms(loss: Tensor, seen: dict[str, list[list[Tensor]]]) -> dict[str, Tensor]:
    seen = {name: steps for name, steps in seen.items() if all(s.requires_grad for step in steps for s in step)}
    if not seen:
        raise ValueError(
            "the states of a recurrent layer of `model` should have a gradient; all are frozen, or constants"
        )
    states = [state for steps in seen.values() for step in steps for state in step]
    gradients = iter(torch.autograd.grad(loss, states, allow_unused=True))
    norms = {}
    for name, steps in seen.items():
        of_steps = [[next(gradients) for _ in step] for step in steps]
        squares = [sum(g.double().square().sum().item() for g in step if g is not None) for step in of_steps]
        norms[name] = torch.tensor(squares, dtype=torch.float64).sqrt()
    return norms


class _Stepwise:
    """Context in which a layer runs one time step at a time and records its states.

    The layer's output is computed from the recorded states, so their gradients include the path through the output.
    """

    def __init__(self, name: str, layer: Any, seen: dict[str, list[list[Tensor]]]) -> None:
        self.name, self.layer, self.seen, self.calls = name, layer, seen, 0
        self.forward, self.own = layer.forward, vars(layer).get("forward")

    def __enter__(self) -> None:
        self.layer.forward = self._run

    def __exit__(self, *_: object) -> None:
        del self.layer.forward
        if self.own is not None:
            self.layer.forward = self.own

    def _run(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        if isinstance(input, PackedSequence):
            raise ValueError(f"{_called(self.name)} should get padded sequences; got a PackedSequence")
        time = 1 if self.layer.batch_first and input.ndim == 3 else 0
        steps, outputs = [], []
        for step in input.split(1, time):
            _, hx = self.forward(step, hx)
            states = list(hx) if isinstance(hx, tuple) else [hx]
            steps.append(states)
            outputs.append(states[0][-1])
        self.calls += 1
        self.seen[self.name if self.calls == 1 else f"{self.name}, call {self.calls}"] = steps
        return torch.stack(outputs, time), hx


def _called(name: str) -> str:
    return f"layer `{name}`" if name else "`model`"


class HiddenGradients(Mapping[str, Tensor]):
    """Maps the name of each layer to ‖∂L/∂h_t‖, (time,). ``print`` shows the first and the last."""

    def __init__(self, norms: dict[str, Tensor]) -> None:
        self._norms = norms

    def __getitem__(self, name: str) -> Tensor:
        return self._norms[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._norms)

    def __len__(self) -> int:
        return len(self._norms)

    def __repr__(self) -> str:
        lines = (
            f"{name or 'model'}: {norms[0]:.3g} at the first of {len(norms)} times, {norms[-1]:.3g} at the last"
            for name, norms in self.items()
        )
        return "\n".join(lines)

    def plot(self, ax: Any = None, label: str | None = None) -> Any:
        """One curve for each layer, on a logarithmic scale. Returns the matplotlib Axes.

        Args:
            ax: where to draw; by default in a new figure, ``ax.figure``.
            label: in place of the name of the layer, to compare nets in one picture.
        """
        ax = new_axes() if ax is None else ax
        for name, norms in self.items():
            ax.plot(range(len(norms)), norms.tolist(), label=label or name or "model")
        ax.set(yscale="log", xlabel="time step t", ylabel="‖∂L/∂h_t‖")
        ax.legend()
        return ax
