"""Adapters that turn a layer's input, its output or both: W becomes Q_out W Q_in, with the same singular values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fasth.adapters.kinds import Adapter, Layer, check_rank, degrees
from fasth.adapters.layers import features_of
from fasth.adapters.turns import BlocksTurn, GeneralTurn, ReflectionsTurn, Turn

SIDES = ("input", "output", "both")


class Turning(Adapter):
    """y = Q_out · layer(Q_in x); for convolutions, at every position. Q_out also turns the bias."""

    def __init__(self, kind: str, options: dict[str, Any], layer: Any, side: str, new: Callable[[int], Turn]) -> None:
        super().__init__(kind, options)
        features = features_of(layer)
        if features is None:
            raise ValueError(f"{type(layer).__name__} has no features to turn")
        if side not in SIDES:
            raise ValueError(f"`side` should be one of {', '.join(map(repr, SIDES))}; got {side!r}")
        self.axis = features.axis
        self.input = new(features.inputs) if side != "output" else None
        self.output = new(features.outputs) if side != "input" else None

    def forward(self, layer: Layer, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Q_out · layer(Q_in x)."""
        if self.input is not None:
            x = self._along_axis(self.input, x, internal=True)
        y = layer(x, *args, **kwargs)
        return y if self.output is None else self._along_axis(self.output, y)

    def _along_axis(self, turn: Turn, x: Tensor, **options: bool) -> Tensor:
        if self.axis == -1:
            return turn(x, **options)
        return turn(x.movedim(self.axis, -1), **options).movedim(-1, self.axis)

    def merged(self, W: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Q_out W Q_in and Q_out b."""
        if self.input is not None:
            W = self.input.transposed(W)
        if self.output is not None:
            W, bias = self.output(W.mT).mT, None if bias is None else self.output(bias)
        return W, bias

    def unmerged(self, W: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Q_outᵀ W Q_inᵀ and Q_outᵀ b."""
        if self.input is not None:
            W = self.input(W)
        if self.output is not None:
            W = self.output.transposed(W.mT).mT
            bias = None if bias is None else self.output.transposed(bias)
        return W, bias

    def restart(self) -> None:
        """Makes Q_in and Q_out the identity."""
        for turn in (self.input, self.output):
            if turn is not None:
                turn.restart()

    def largest_angle(self) -> float:
        """The largest angle of Q_in and Q_out, in degrees."""
        return max(degrees(turn.angles()) for turn in (self.input, self.output) if turn is not None)


def reflections(layer: Any, *, r: int = 8, side: str = "input", device: Any, dtype: Any) -> Turning:
    """Makes an adapter with r reflections a side."""
    options = {"r": check_rank(r), "side": side}
    return Turning("reflections", options, layer, side, lambda d: ReflectionsTurn(d, r, device, dtype))


def orthogonal(layer: Any, *, side: str = "input", block_size: int | None = None, device: Any, dtype: Any) -> Turning:
    """Makes an adapter with a general rotation, or one rotation for each block of features."""
    if block_size is not None and (not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1):
        raise ValueError(f"`block_size` should be an int of at least 1, or None; got {block_size!r}")

    def new(d: int) -> Turn:
        if block_size is None or block_size == d:
            return GeneralTurn(d, device, dtype)
        return BlocksTurn(d, block_size, device, dtype)

    return Turning("orthogonal", {"side": side, "block_size": block_size}, layer, side, new)
