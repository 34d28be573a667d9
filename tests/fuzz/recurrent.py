"""Recurrent layers through sequences of changes, against loops over time in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasth import GRUSVD, LSTMSVD, RNNSVD, cached, spectrum
from fasth.nn.held_weight import HeldWeight
from fasth.tools.twins import definition_weight
from fuzz.changes import change
from fuzz.compare import check, norm, tolerance
from fuzz.draws import DTYPES, PRECISE, Draw
from fuzz.layers import SPECTRA, moved, without_guard


def recurrent_case(draw: Draw) -> None:
    kind = draw.choice([RNNSVD, RNNSVD, LSTMSVD, GRUSVD])
    options: dict[str, Any] = {
        "num_layers": draw.choice([1, 1, 2]),
        "bias": draw.chance(0.7),
        "batch_first": draw.chance(0.4),
        "bidirectional": draw.chance(0.3),
    }
    if kind is RNNSVD:
        options["nonlinearity"] = draw.choice(["modrelu", "tanh", "relu"])
        options["eps"] = draw.choice([0, 0.01, 0.1])
    smooth = options.get("nonlinearity") not in ("modrelu", "relu")
    options["dtype"] = draw.dtype(DTYPES if smooth else PRECISE)
    if options.get("eps", 1) and draw.chance(0.4):
        options["spectrum"] = draw.choice(SPECTRA)
    options["init"] = draw.choice(["haar", "identity", "henaff", "cayley"])
    sizes = draw.between(1, 6), draw.size(12)
    layer: Any = moved(draw, kind(*sizes, **options))
    time, batch = draw.between(1, 5), draw.between(1, 4)
    shape = (batch, time, sizes[0]) if layer.batch_first else (time, batch, sizes[0])
    shape = (time, sizes[0]) if draw.chance(0.1) else shape
    draw.note(kind.__name__, sizes, options, f"x {shape}")
    for again in range(draw.weighted({1: 2, 2: 2, 3: 1})):
        x = draw.arranged(draw.numbers(*shape, dtype=layer.weight_ih_l0.dtype))
        if again:
            layer = change(draw, layer, lambda layer, x=x: layer(x.to(layer.weight_ih_l0.dtype))[0])
            x = x.to(layer.weight_ih_l0.dtype)
        mode = draw.weighted({"train": 3, "no_grad": 1, "cached": 1})
        draw.note(mode)
        draw.actions[mode] += 1
        if mode == "cached":
            with cached():
                _compare(draw, layer, x, False)
                _compare(draw, layer, x, True)
        else:
            _compare(draw, layer, x, mode == "train")


def _compare(draw: Draw, layer: Any, x: Tensor, train: bool) -> None:
    """The output at all times, the last states, and the gradients; not where a kink is too close to tell sides."""
    hx = _states(draw, layer, x) if draw.chance(0.5) else None
    x = x.detach().requires_grad_(train)
    twin, x64 = Twin(layer), x.detach().double().requires_grad_(train)
    with torch.set_grad_enabled(train):
        values = flat(layer(x, hx) if hx is not None else layer(x))
        expected = twin.run(x64, None if hx is None else [h.double() for h in flat_states(hx)])
    growth = max(twin.largest, 1.0) ** twin.time
    operations = (
        (sum(layer._matrix_shape) + layer.input_size + x.numel() // layer.input_size + 10)
        * twin.time
        * layer.num_layers
        * growth
    )
    relative = tolerance(x.dtype, operations, 2 * twin.time * layer.num_layers * growth)
    size = 1 + norm(x) + max(float(t.detach().abs().max()) for t in expected)
    if twin.margin < relative * size or relative > 1:
        draw.actions["too close to a kink to compare" if relative <= 1 else "too coarse to compare"] += 1
        assert all(bool(v.isfinite().all()) for v in values), "output: not finite"
        return
    for name, value, reference in zip(("output", "h", "c"), values, expected, strict=False):
        assert value.dtype == x.dtype, f"{name}: {value.dtype}, not {x.dtype}"
        check(name, value, reference, size, relative)
    if train and values[0].requires_grad:
        _compare_gradients(draw, layer, twin, x, x64, values, expected, relative)


def _compare_gradients(
    draw: Draw,
    layer: Any,
    twin: Twin,
    x: Tensor,
    x64: Tensor,
    values: list[Tensor],
    expected: list[Tensor],
    relative: float,
) -> None:
    """Sums over time of products: relative to the largest of all of them."""
    g = [draw.numbers(*v.shape, dtype=v.dtype) for v in values]
    wanted = {name: p for name, p in layer.named_parameters() if p.requires_grad} | {"x": x}
    found = torch.autograd.grad(values, list(wanted.values()), g, allow_unused=True)
    twins = [x64 if name == "x" else twin.tensors[name] for name in wanted]
    references = torch.autograd.grad(expected, twins, [t.double() for t in g], allow_unused=True)
    sizes = [float(t.abs().max()) for t in references if t is not None and t.numel()]
    size = max([*sizes, (1 + norm(x)) * sum(map(norm, g)) * max(twin.largest, 1)])
    for name, gradient, reference in zip(wanted, found, references, strict=True):
        like = x64 if name == "x" else twin.tensors[name]
        reference = torch.zeros_like(like) if reference is None else reference
        gradient = torch.zeros_like(reference) if gradient is None else gradient
        slope = 1.0
        if name.startswith("reflectors"):
            parts = [t.unflatten(0, (layer._gates, -1)) for t in (gradient, reference, like)]
            gradient, reference = without_guard(*parts)
        elif name.startswith("sigma") and layer.spectrum == spectrum.normalized():
            rows = like.detach().view(layer._gates, -1)
            slope = (1 + rows.shape[-1]) / max(float(rows.abs().amax(-1).min()), 1e-30)
        check(f"gradient of {name}", gradient, reference, size * max(slope, 1), relative)


def _states(draw: Draw, layer: Any, x: Tensor) -> Any:
    batch = () if x.ndim == 2 else (x.shape[0 if layer.batch_first else 1],)
    shapes = [(len(layer._places()), *batch, size) for size in layer._state_names().values()]
    states = [draw.numbers(*shape, dtype=x.dtype) for shape in shapes]
    return tuple(states) if len(states) > 1 else states[0]


def flat(result: Any) -> list[Tensor]:
    output, states = result
    return [output, *flat_states(states)]


def flat_states(states: Any) -> list[Tensor]:
    return list(states) if isinstance(states, tuple) else [states]


class Twin:
    """The layer from its current parameters in float64: one step after the other, weights by the definition."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.tensors = {
            name: p.detach().double().requires_grad_(p.requires_grad) for name, p in layer.named_parameters()
        }
        self.margin = float("inf")  # how far the nearest number is from a kink of the nonlinearity
        self.largest = 1.0
        self.time = 1

    def run(self, x: Tensor, states: list[Tensor] | None) -> list[Tensor]:
        layer, unbatched = self.layer, x.ndim == 2
        if unbatched:
            x = x.unsqueeze(1)
            states = None if states is None else [h.unsqueeze(1) for h in states]
        elif layer.batch_first:
            x = x.transpose(0, 1)
        self.time = len(x)
        zeros = [x.new_zeros(len(layer._places()), x.shape[1], layer.hidden_size)] * (2 if layer._gates == 4 else 1)
        states = zeros if states is None else states
        last: list[tuple[Tensor, ...]] = []
        directions = 1 + layer.bidirectional
        for i in range(layer.num_layers):
            outputs = []
            for place in layer._places()[i * directions : (i + 1) * directions]:
                out, end = self._direction(place, x, tuple(h[len(last)] for h in states))
                outputs.append(out)
                last.append(end)
            x = torch.cat(outputs, -1)
        ends = [torch.stack(parts) for parts in zip(*last, strict=True)]
        if unbatched:
            return [x.squeeze(1), *(h.squeeze(1) for h in ends)]
        return [x.transpose(0, 1) if layer.batch_first else x, *ends]

    def _direction(self, place: str, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        W_hh, bias = self._hidden_weight(place), self.layer.bias
        inputs = x @ self.tensors[f"weight_ih_{place}"].mT + (self.tensors[f"bias_ih_{place}"] if bias else 0)
        b_hh = self.tensors[f"bias_hh_{place}"] if bias else 0
        steps: list[Any] = [None] * len(x)
        for t in reversed(range(len(x))) if place.endswith("reverse") else range(len(x)):
            state = self._step(place, inputs[t], state[0] @ W_hh.mT + b_hh, state)
            steps[t] = state[0]
        return torch.stack(steps), state

    def _step(self, place: str, inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        gates = self.layer._gates
        if gates == 1:
            return (self._nonlinearity(place, inputs + hidden),)
        if gates == 4:
            i, f, cell, o = (inputs + hidden).chunk(4, -1)
            c = f.sigmoid() * state[1] + i.sigmoid() * cell.tanh()
            return o.sigmoid() * c.tanh(), c
        (r, z, n), (hr, hz, hn) = inputs.chunk(3, -1), hidden.chunk(3, -1)
        z = (z + hz).sigmoid()
        return ((1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * state[0],)

    def _nonlinearity(self, place: str, z: Tensor) -> Tensor:
        if self.layer.nonlinearity == "tanh":
            return z.tanh()
        kinks = [z.detach().abs()]
        if self.layer.nonlinearity == "relu":
            h = z.relu()
        else:
            size = z.abs() + self.tensors[f"bias_modrelu_{place}"]
            kinks.append(size.detach().abs())
            h = torch.where(size > 0, z.sign() * size, 0)
        self.margin = min(self.margin, *(float(kink.min()) for kink in kinks if kink.numel()))
        return h

    def _hidden_weight(self, place: str) -> Tensor:
        """The matrices of the gates, one below the other."""
        layer = self.layer
        n, m = layer._matrix_shape
        reflectors = self.tensors[f"reflectors_{place}"].chunk(layer._gates)
        sigma: Any = [None] * layer._gates
        if layer.spectrum is not None:
            sigma = self.tensors[f"sigma_{place}"].chunk(layer._gates)
            self.largest = max(self.largest, *(float(layer.spectrum(s.detach()).abs().max()) for s in sigma))
        gates = [
            HeldWeight("", (n, m), R, s, None, "compact", layer.spectrum)
            for R, s in zip(reflectors, sigma, strict=True)
        ]
        return torch.cat([definition_weight(gate) for gate in gates])
