"""x Wᵀ + bias with W = U Σ Vᵀ, on every path, against the definition: one reflection at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fasth.functional import svd_dense, svd_linear
from fasth.reflections import planner
from fasth.tools.problems import gradient_of
from fasth.tools.twins import definition_svd


@dataclass(frozen=True)
class Shape:
    rows: tuple[int, ...]
    n: int
    m: int
    k: int | None = None

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.n}x{self.m}" + ("" if self.k is None else f", rank {self.k}")


SHAPES = [
    Shape((5,), 8, 8),
    Shape((5,), 12, 7),
    Shape((5,), 7, 12),
    Shape((3,), 1, 1),
    Shape((3,), 1, 6),
    Shape((3,), 6, 1),
    Shape((), 6, 5),
    Shape((0,), 6, 5),
    Shape((2, 3), 6, 5),
    Shape((5,), 9, 11, 4),
    Shape((5,), 9, 11, 0),
    Shape((7,), 70, 130),
    Shape((6,), 100, 65),
    Shape((33,), 70, 130),
    Shape((40,), 100, 65),
    Shape((40,), 12, 7),
    Shape((40,), 9, 11, 4),
    Shape((200,), 90, 70),
    Shape((300,), 40, 70),  # W is formed
]
FORMS = ["compact", "shared", "full", "triangular"]


def draw(shape: Shape, form: str, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Draws all arguments of ``svd_linear``, requiring gradients. ``shared``: signed, both sides in one matrix."""
    generator = torch.Generator().manual_seed(shape.n + shape.m)
    n, m = shape.n, shape.m
    k = min(n, m) if shape.k is None else shape.k
    sizes = {"x": (*shape.rows, m), "U": (n, m), "sigma": (k,), "V": (m, m), "bias": (n,)}
    if form != "shared":
        sizes["U"] = (n, n)
    tensors = {
        name: torch.randn(size, dtype=torch.float64, generator=generator).to(device, dtype)
        for name, size in sizes.items()
    }
    if form == "shared":
        del tensors["V"]
    if form in ("shared", "compact"):
        for name in ("U", "V"):
            if name in tensors:
                tensors[name] = tensors[name].clamp(-1, 1)
                diagonal = tensors[name].diagonal()  # away from zero, where signs have a gradient
                diagonal.copy_(diagonal.sign() * diagonal.abs().clamp(min=0.25))
    return {name: t.requires_grad_() for name, t in tensors.items()}


def expected(tensors: dict[str, Tensor], form: str) -> tuple[Tensor, ...]:
    exact = {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in tensors.items()}
    W = definition_svd(exact["U"], exact["sigma"], exact.get("V"), name_of(form))
    return with_gradients(F.linear(exact["x"], W, exact["bias"]), exact)


def with_gradients(out: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    g = gradient_of(out).to(tensors["x"].dtype).to(out)
    inputs = [t for t in tensors.values() if t.requires_grad]
    found = torch.autograd.grad(out, inputs, g, allow_unused=True)
    return out, *(torch.zeros_like(t) if f is None else f for f, t in zip(found, inputs, strict=True))


def actual(tensors: dict[str, Tensor], form: str) -> Tensor:
    return svd_linear(**tensors, form=name_of(form))


def name_of(form: str) -> str:
    return "compact" if form == "shared" else form


def assert_all_close(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], d: int) -> None:
    """Within 8 d roundings of numbers as large as the largest on their way."""
    scale = max([1.0] + [t.abs().max().item() for t in wanted if t.numel()])
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        tolerance = 8 * d * (torch.finfo(a.dtype).eps + torch.finfo(b.dtype).eps)
        if a.numel():
            assert (a.double() - b).abs().max() <= tolerance * scale


@pytest.mark.every_level
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradients(path: str, shape: Shape, form: str, precise: torch.dtype, device: str) -> None:
    tensors = draw(shape, form, precise, device)
    got = with_gradients(actual(tensors, form), tensors)
    assert_all_close(got, expected(tensors, form), shape.n + shape.m)


@pytest.mark.parametrize(("form", "trains_all"), [("compact", False), ("full", True)])
@pytest.mark.parametrize("side", ["U", "V"])
@pytest.mark.parametrize("shape", [*SHAPES, Shape((32,), 260, 20), Shape((32,), 20, 260)], ids=str)
def test_without_reflectors_on_one_side(
    path: str,
    shape: Shape,
    side: str,
    form: str,
    trains_all: bool,
    precise: torch.dtype,
    set_threads: Callable[[int], None],
) -> None:
    """That side is the identity, as in LinearOrthogonal, where the singular values are constants, too."""
    set_threads(3)
    tensors = draw(shape, form, precise, "cpu")
    tensors[side] = tensors[side].new_empty(0, tensors[side].shape[1]).requires_grad_(trains_all)
    tensors["sigma"].requires_grad_(trains_all)
    got = with_gradients(actual(tensors, form), tensors)
    assert_all_close(got, expected(tensors, form), shape.n + shape.m)


@pytest.mark.parametrize(("n", "rows", "threads"), [(320, 64, 4), (320, 64, 1), (200, 64, 3)])
@pytest.mark.parametrize("form", FORMS)
def test_more_rows_than_a_block_has_reflections(
    n: int, rows: int, threads: int, form: str, device: str, set_threads: Callable[[int], None]
) -> None:
    """The rows after every block are not saved then."""
    set_threads(threads)
    tensors = draw(Shape((rows,), n, n), form, torch.float32, device)
    got = with_gradients(actual(tensors, form), tensors)
    assert_all_close(got, expected(tensors, form), 2 * n)


@pytest.mark.parametrize("side", ["U", "V"])
@pytest.mark.parametrize(("n", "m", "k"), [(130, 130, 130), (150, 130, 130), (130, 150, 130), (150, 150, 129)])
@pytest.mark.parametrize("form", ["compact", "full"])
def test_dense_without_reflectors_on_one_side(path: str, form: str, n: int, m: int, k: int, side: str) -> None:
    tensors = draw(Shape((3,), n, m, k), form, torch.float64, "cpu")
    tensors[side] = tensors[side].new_empty(0, tensors[side].shape[1])
    options = {name: tensors[name] for name in ("U", "sigma", "V")}
    out = torch.nn.functional.linear(tensors["x"], svd_dense(**options, form=form), tensors["bias"])
    assert_all_close(with_gradients(out, tensors), expected(tensors, form), n + m)


@pytest.mark.parametrize("side", ["U", "V"])
def test_dense_has_an_empty_gradient_of_no_reflectors(side: str) -> None:
    factors = {"U": torch.randn(4, 4), "V": torch.randn(4, 4), side: torch.empty(0, 4, requires_grad=True)}
    W = svd_dense(factors["U"], torch.ones(4), factors["V"], form="full")
    (gradient,) = torch.autograd.grad(W.sum(), factors[side])
    assert gradient.shape == (0, 4)


@pytest.mark.parametrize("form", FORMS)
def test_dense(path: str, form: str, device: str) -> None:
    for shape in SHAPES:
        tensors = draw(shape, form, torch.float64, device)
        options = {name: tensors.get(name) for name in ("U", "sigma", "V")}
        W = svd_dense(**options, form=name_of(form))
        assert W.shape == (shape.n, shape.m)
        out = torch.nn.functional.linear(tensors["x"], W, tensors["bias"])
        assert_all_close((out,), (actual(tensors, form).double(),), shape.n + shape.m)


@pytest.mark.parametrize("form", ["shared", "full"])
@pytest.mark.parametrize("wanted", ["x", "U", "sigma", "V", "bias"])
def test_one_gradient_at_a_time(path: str, form: str, wanted: str, device: str) -> None:
    tensors = draw(Shape((5,), 12, 7), form, torch.float64, device)
    if wanted not in tensors:
        wanted = "U"
    for name, t in tensors.items():
        t.requires_grad_(name == wanted)
    got = with_gradients(actual(tensors, form), tensors)
    assert_all_close(got, expected(tensors, form), 19)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(path: str, threads: int) -> None:
    tensors = draw(Shape((32,), 200, 140), "shared", torch.float64, "cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = with_gradients(actual(tensors, "shared"), tensors)
        out = actual(tensors, "shared")
        torch.set_num_threads(2)  # another number of threads than in the forward pass
        again = with_gradients(out, tensors)
    finally:
        torch.set_num_threads(before)
    wanted = expected(tensors, "shared")
    assert_all_close(got, wanted, 340)
    assert_all_close(again, wanted, 340)


@pytest.mark.parametrize("form", [*FORMS, "one tensor"])
@pytest.mark.parametrize("shape", [Shape((130,), 100, 140), Shape((270,), 260, 260), Shape((520,), 600, 500)], ids=str)
def test_rows_do_not_depend_on_each_other(
    shape: Shape, form: str, precise: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    """Teams share out many rows, and add up the gradients of everything else."""
    one = form == "one tensor"
    form = "full" if one else form
    shape = Shape(shape.rows, shape.n, shape.n) if one else shape
    tensors = draw(shape, form, precise, "cpu")
    if one:
        tensors["U"].data[::50] *= 1e-8  # scaled
        tensors["V"] = tensors["U"]

    def result(rows: int) -> tuple[Tensor, ...]:
        out = torch.cat([actual({**tensors, "x": x}, form) for x in tensors["x"].split(rows)])
        return with_gradients(out, {name: t for name, t in tensors.items() if not (one and name == "V")})

    set_threads(1)
    wanted = tuple(t.double() for t in result(50))
    for threads in (1, 2, 3, 6):
        set_threads(threads)
        assert_all_close(result(shape.rows[0]), wanted, shape.n + shape.m)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [3, 40])
def test_gradients_are_the_same_whatever_was_saved(
    nothing_remembered: None,
    monkeypatch: pytest.MonkeyPatch,
    level: int,
    form: str,
    rows: int,
    precise: torch.dtype,
    device: str,
) -> None:
    tensors = draw(Shape((rows,), 70, 130), form, precise, device)
    monkeypatch.setattr(planner, "_level", lambda *_: level)
    assert_all_close(with_gradients(actual(tensors, form), tensors), expected(tensors, form), 200)


def test_little_is_saved_where_the_rows_after_every_block_would_take_much_memory(path: str) -> None:
    tensors = draw(Shape((1400,), 16, 700), "shared", torch.float32, "cpu")
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        out = actual(tensors, "shared")
    given_size = sum(t.numel() for t in tensors.values())
    assert sum(sizes) <= 4 * given_size + (1 << 18)
    assert_all_close(with_gradients(out, tensors), expected(tensors, "shared"), 716)


def test_second_derivatives(path: str) -> None:
    tensors = draw(Shape((2,), 4, 3), "shared", torch.float64, "cpu")
    tensors["U"] = tensors["U"].detach().mul(0.9).requires_grad_()

    def function(*inputs: Tensor) -> Tensor:
        return actual(dict(zip(tensors, inputs, strict=True)), "shared")

    assert torch.autograd.gradcheck(function, tuple(tensors.values()))
    assert torch.autograd.gradgradcheck(function, tuple(tensors.values()))


def test_one_tensor_as_both_sides(path: str) -> None:
    tensors = draw(Shape((2,), 3, 3), "compact", torch.float64, "cpu")

    def function(x: Tensor, U: Tensor, sigma: Tensor) -> Tensor:
        return svd_linear(x, U, sigma, U)

    U = tensors["U"].detach().mul(0.9)
    U.diagonal().sign_()  # signs have no gradient unless they are close to zero
    inputs = tensors["x"], U.requires_grad_(), tensors["sigma"]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_strides(path: str, device: str) -> None:
    tensors = draw(Shape((6,), 10, 14), "shared", torch.float64, device)
    strided = {
        name: t.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_(t.requires_grad)
        for name, t in tensors.items()
    }
    strided["U"] = tensors["U"].detach().mT.clone().mT.requires_grad_()
    got = with_gradients(actual(strided, "shared"), strided)
    assert_all_close(got, expected(tensors, "shared"), 24)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", ["compact", "full", "triangular"])
def test_one_tensor_as_both_sides_has_the_gradients_of_both(
    path: str, form: str, threads: int, precise: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    set_threads(threads)
    tensors = draw(Shape((33,), 150, 150), form, precise, "cpu")
    wanted = dict(zip(tensors, expected({**tensors, "V": tensors["U"]}, form)[1:], strict=False))
    del tensors["V"]
    found = torch.autograd.grad(
        (out := svd_linear(**tensors, V=tensors["U"], form=form)), (tensors["U"],), gradient_of(out).to(out)
    )
    assert_all_close(found, (wanted["U"] + wanted["V"],), 300)


@pytest.mark.every_level
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape.rows) == 1], ids=str)
def test_x_of_any_strides(path: str, shape: Shape, precise: torch.dtype) -> None:
    """Columns of a matrix as rows, every other column, and whatever the gradient that comes back looks like."""
    tensors = draw(shape, "shared", precise, "cpu")
    wanted = expected(tensors, "shared")
    x, g = tensors["x"].detach(), gradient_of(wanted[0]).to(precise)
    inputs = [t for name, t in tensors.items() if name != "x"]
    for lay_out in (lambda t: t.mT.contiguous().mT, lambda t: torch.stack((t, t), -1)[..., 0]):
        strided = lay_out(x).requires_grad_()
        out = actual({**tensors, "x": strided}, "shared")
        found = torch.autograd.grad(out, [strided, *inputs], lay_out(g))
        assert_all_close((out, *found), wanted, shape.n + shape.m)


def test_a_hook_that_changes_saved_tensors_is_found_out() -> None:
    tensors = draw(Shape((5,), 8, 8), "shared", torch.float32, "cpu")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.double()):
        out = actual(tensors, "shared")
    with pytest.raises(RuntimeError, match="saved tensor"):
        out.sum().backward()


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.randn(5, 9)},
        {"x": torch.randn(5, 8, dtype=torch.float64)},
        {"sigma": torch.randn(9)},
        {"bias": torch.randn(7)},
        {"bias": torch.randn(8, dtype=torch.float64)},
    ],
)
def test_bad_arguments(path: str, change: dict[str, Tensor]) -> None:
    tensors = draw(Shape((5,), 8, 8), "shared", torch.float32, "cpu")
    with pytest.raises((ValueError, TypeError), match="should have"):
        actual(tensors | change, "shared")


@pytest.mark.parametrize(("n", "m"), [(1024, 1056), (1088, 1024), (1030, 1030)])
def test_gradients_too_large_for_the_caches(path: str, n: int, m: int) -> None:
    """Results are written past them where the layout permits. The twin is a product with the dense weight."""
    tensors = draw(Shape((8,), n, m), "shared", torch.float32, "cpu")
    tensors["U"] = tensors["U"].detach().mul(0.05).requires_grad_()
    W = svd_dense(tensors["U"], tensors["sigma"], form="compact")
    twin = with_gradients(torch.nn.functional.linear(tensors["x"], W, tensors["bias"]), tensors)
    assert_all_close(with_gradients(actual(tensors, "shared"), tensors), tuple(t.double() for t in twin), n + m)


@pytest.mark.parametrize("form", ["shared", "compact"])
@pytest.mark.parametrize("rows", [3, 40])
def test_signs_close_to_zero_are_pushed_away_from_it(path: str, form: str, rows: int, precise: torch.dtype) -> None:
    """The gradient is ∓0.1 where the size of a diagonal entry is below 0.25; −0 counts as negative."""
    tensors = draw(Shape((rows,), 70, 40), form, precise, "cpu")
    values = torch.tensor([0.0, -0.0, 0.2, -0.2, 0.3, -0.3, 1.0, -1.0], dtype=precise)
    pushes = torch.tensor([-0.1, 0.1, -0.1, 0.1, 0, 0, 0, 0], dtype=precise)
    for name in ("U", "V"):
        if name in tensors:
            tensors[name].detach().diagonal()[:8] = values
    got = dict(zip(["out", *tensors], with_gradients(actual(tensors, form), tensors), strict=True))
    wanted = dict(zip(["out", *tensors], expected(tensors, form), strict=True))
    for name in ("U", "V"):
        if name in tensors:
            factor = 2 if form == "shared" and path == "pytorch" else 1  # two products, and each of them pushes
            torch.testing.assert_close(got[name].diagonal()[:8], factor * pushes)
            got[name].diagonal().zero_()
    assert_all_close(tuple(got.values()), tuple(wanted.values()), 110)


def test_the_gradient_of_a_formed_weight_with_a_bias():
    """The output is not saved then, since it has the bias in it."""
    torch.manual_seed(0)
    U, sigma, bias = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((8, 8), (8,), (8,)))
    eye, g = torch.eye(8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(svd_linear(eye, U, sigma, bias=bias, of_identity=hint), (U, sigma, bias), g)
        for hint in (True, False)
    )
    torch.testing.assert_close(found, expected)
