"""``fasth.householder`` against the definition."""

from __future__ import annotations

from torch import Tensor

from fasth import householder
from fasth.tools.problems import from_definition
from fuzz.compare import check, doubled, largest_row, lengths, norm, tolerance, values_and_gradients, wanting
from fuzz.draws import Draw

BATCHES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((2,), ()), ((2, 3), ()), ((3,), (3,)), ((), (3,)), ((1,), (4,)), ((2, 1), (3,)), ((0,), (0,)), ((2, 2), (2, 2)),
]  # fmt: skip


def householder_case(draw: Draw) -> None:
    dtype = draw.dtype()
    d = draw.size(rare=300)
    r = draw.choice([d, d, draw.between(0, d), draw.between(0, min(2 * d, 60)), draw.between(0, 3)])
    rows = draw.weighted({draw.size(8): 5, draw.size(40): 4, 0: 1, draw.between(41, 300) if d < 41 else 1: 1})
    x_batch, V_batch = draw.choice(BATCHES) if d < 41 and draw.chance(0.3) else ((), ())
    x_shape = (d,) if draw.chance(0.05) else (*x_batch, rows, d)
    options = {"transpose": draw.chance(0.5), "triangular": draw.chance(0.4)}
    block_size = draw.choice([None, None, 1, draw.size(), 64])
    draw.note(f"x {x_shape}", options, f"block_size {block_size}")
    x, V = wanting(draw, draw.rows(*x_shape, dtype=dtype), draw.reflectors(*V_batch, r, d, dtype=dtype))

    actual = values_and_gradients(draw, lambda x, V: householder(x, V, block_size=block_size, **options), (x, V))
    expected = values_and_gradients(draw, lambda x, V: from_definition(x, V, **options), doubled((x, V)), actual[2])
    check_product(actual, expected, x, V.triu() if options["triangular"] else V)
    draw.actions["householder"] += 1


def check_product(actual: tuple[list[Tensor], ...], expected: tuple[list[Tensor], ...], x: Tensor, V: Tensor) -> None:
    """x Qᵀ and the gradients of x and V, each by its natural size: reflections keep the lengths of rows.

    A reflector's gradient is a sum of products of rows over its length; where a tensor was broadcast, a sum over that.
    """
    (out,), (reference,) = actual[0], expected[0]
    assert out.dtype == x.dtype, f"value: {out.dtype}, not {x.dtype}"
    relative = tolerance(x.dtype, max(V.shape[-2], 1))
    check("value", out, reference, largest_row(x), relative)
    if not actual[2]:
        return
    g = actual[2][0]
    names = [name for name, t in (("x", x), ("V", V)) if t.requires_grad]
    for name, gradient, expected_gradient in zip(names, actual[1], expected[1], strict=True):
        if name == "x":
            size: Tensor | float = largest_row(g) if out.shape == x.shape else norm(g)
        else:
            size = norm(x.detach().expand(out.shape)) * norm(g) / lengths(V)
            relative = tolerance(x.dtype, V.shape[-2] + out.numel() // out.shape[-1])  # a sum over all rows
        assert gradient.dtype == x.dtype, f"gradient of {name}: {gradient.dtype}, not {x.dtype}"
        check(f"gradient of {name}", gradient, expected_gradient, size, relative)
