"""``torch.compile`` of a layer, whose parameters change after it: rare, as compiling takes seconds."""

from __future__ import annotations

from typing import Any

import torch

from fasth import Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric, cached
from fuzz.changes import data, in_place, load, step
from fuzz.draws import PRECISE, Draw
from fuzz.layers import compare_training, moved


def compiled_case(draw: Draw) -> None:
    dtype, d = draw.dtype(PRECISE), draw.size(12)
    kind = draw.choice([LinearSVD, LinearSymmetric, LinearOrthogonal, Conv2dSVD])
    sizes = {LinearSymmetric: (d,), Conv2dSVD: (2, 3, 2)}.get(kind, (d, draw.size(12)))
    layer: Any = moved(draw, kind(*sizes, dtype=dtype))
    shape = (2, 2, 5, 5) if kind is Conv2dSVD else (draw.size(8), d)
    backend = draw.choice(["aot_eager", "aot_eager", "inductor"])
    draw.note(layer, backend)
    compiled = torch.compile(layer, backend=backend)
    try:
        for again in range(3):
            x = draw.numbers(*shape, dtype=dtype)
            if again:
                action = draw.choice([in_place, data, load, step])
                draw.note(action.__name__)
                action(draw, layer, lambda layer, x=x: layer(x))
            draw.actions["compile"] += 1
            compare_training(draw, layer, x, compiled)
            if draw.chance(0.3):
                with cached():
                    compare_training(draw, layer, x, compiled)
    finally:
        torch._dynamo.reset()
