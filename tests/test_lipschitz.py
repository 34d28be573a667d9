"""1-Lipschitz by construction: every piece is attacked, and every bound is compared with the norm that it bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import fasth
from fasth import lipschitz
from fasth.nn.lipschitz import GroupSort, LinearUnitRows, NormPool2d, Residual, ScaledAvgPool2d

SAME: dict[str, Any] = {"padding": "same", "padding_mode": "circular"}
ROUNDING = 1 + 1e-5


def attacked(f: Callable[[Tensor], Tensor], x: Tensor, steps: int = 60) -> float:
    """The largest ‖f(x + e) − f(x)‖ / ‖e‖ that gradient ascent finds from a small random e."""
    e = 1e-3 * torch.randn_like(x)
    best = 0.0
    for _ in range(steps):
        e = e.detach().requires_grad_()
        ratio = (f(x + e) - f(x)).norm() / e.norm()
        best = max(best, ratio.item())
        (gradient,) = torch.autograd.grad(ratio, e)
        e = e + 0.3 * e.norm() * gradient / gradient.norm().clamp(min=1e-12)
    return best


PIECES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MaxMin": (GroupSort, (2, 6, 3, 3)),
    "GroupSort of three, along the last": (lambda: GroupSort(3, dim=-1), (4, 6)),
    "ScaledAvgPool2d": (lambda: ScaledAvgPool2d(2), (2, 3, 5, 4)),
    "NormPool2d": (lambda: NormPool2d(2), (2, 3, 4, 5)),
    "LinearUnitRows": (lambda: LinearUnitRows(5, 1), (1, 5)),
    "residual": (lambda: Residual(fasth.Conv2dOrthogonal(4, 4, 3, padding=1), GroupSort()), (1, 4, 4, 4)),
    "Conv2dOrthogonal": (lambda: fasth.Conv2dOrthogonal(4, 6, 3, 2, 1), (1, 4, 6, 6)),
    "circular": (lambda: fasth.Conv2dOrthogonal(4, 6, 3, **SAME), (1, 4, 5, 4)),
    "transposed": (lambda: fasth.ConvTranspose2dOrthogonal(6, 4, 3, 2, 1, 1), (1, 6, 3, 3)),
}
every_piece = pytest.mark.parametrize("name", PIECES)


@every_piece
def test_no_attack_finds_more_than_1(name: str) -> None:
    make, shape = PIECES[name]
    torch.manual_seed(0)
    piece = make().double()
    found = attacked(piece, torch.randn(shape, dtype=torch.float64))
    assert 0.8 < found <= ROUNDING
    assert lipschitz.bound(piece).value <= ROUNDING


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_group_sort(size: int) -> None:
    x = torch.randn(4, 6, 2, 3, dtype=torch.float64)
    y = GroupSort(size)(x)
    torch.testing.assert_close(y, x.unflatten(1, (-1, size)).sort(2).values.flatten(1, 2))
    assert gradcheck(GroupSort(size), x.requires_grad_(), fast_mode=True)
    torch.testing.assert_close(y.norm(), x.norm())
    g = torch.randn_like(y)
    (found,) = torch.autograd.grad(GroupSort(size)(x), x, g)
    torch.testing.assert_close(found.norm(), g.norm())


def test_norm_pool_keeps_the_norm() -> None:
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(NormPool2d(2)(x).norm(), x.norm())
    assert gradcheck(NormPool2d(2), x, fast_mode=True)
    zero = torch.zeros(1, 1, 2, 2, requires_grad=True)
    NormPool2d(2)(zero).sum().backward()
    assert zero.grad is not None and zero.grad.abs().max() == 0
    torch.testing.assert_close(ScaledAvgPool2d(2)(torch.ones(1, 1, 4, 4)).norm(), torch.ones(1, 1, 4, 4).norm())


def test_residual_is_half_of_each_at_the_start() -> None:
    f = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    residual = Residual(f)
    torch.testing.assert_close(residual(x), (x + f(x)) / 2)
    with torch.no_grad():
        residual.raw.fill_(1.0)
    alpha = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(residual(x), alpha * x + (1 - alpha) * f(x))


def test_rows_of_norm_1() -> None:
    layer = LinearUnitRows(4, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.mul_(7)
        layer.weight[0].mul_(1e-9)
        layer.weight[1].mul_(1e9)
    torch.testing.assert_close(layer.rows.norm(dim=1), torch.ones(3, dtype=torch.float64))
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ layer.rows.mT + layer.bias)


# The loss and the radius.


def test_margin_loss_is_that_of_its_formula_and_tends_to_the_hinge() -> None:
    scores, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 3])
    own = scores.gather(1, labels[:, None])
    others = scores.masked_fill(torch.eye(4)[labels].bool(), -math.inf)
    hinge = (1.5 - (own[:, 0] - others.amax(1))).clamp(min=0).mean()
    torch.testing.assert_close(lipschitz.margin_loss(scores, labels, margin=1.5, temperature=1e-4), hinge)
    tau = 0.3
    terms = torch.exp((others - own + 1.5) / tau).sum(1)
    expected = (tau * torch.log1p(terms)).mean()
    torch.testing.assert_close(lipschitz.margin_loss(scores, labels, margin=1.5, temperature=tau), expected)
    with pytest.raises(ValueError, match="`temperature` should be above 0; got 0"):
        lipschitz.margin_loss(scores, labels, temperature=0)


def test_certified_radius() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]])
    torch.testing.assert_close(lipschitz.certified_radius(scores), torch.tensor([1.0, 4.0]) / math.sqrt(2))
    labels = torch.tensor([2, 1])
    found = lipschitz.certified_radius(scores, labels, lipschitz=2.0)
    torch.testing.assert_close(found, torch.tensor([-1.0, 4.0]) / math.sqrt(2) / 2)
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    expected = torch.tensor([min(2 / math.sqrt(2), 1 / 2), min(5 / math.sqrt(2), 4 / math.sqrt(2))])
    torch.testing.assert_close(lipschitz.certified_radius(scores, rows=rows), expected)


def network() -> nn.Sequential:
    return nn.Sequential(
        fasth.Conv2dOrthogonal(1, 8, 3, padding=1),
        GroupSort(),
        fasth.Conv2dOrthogonal(8, 16, 2, 2),
        GroupSort(),
        Residual(fasth.Conv2dOrthogonal(16, 16, 3, padding=1), GroupSort()),
        NormPool2d(2),
        nn.Flatten(),
        LinearUnitRows(64, 4),
    )


def test_no_attack_changes_the_class_within_the_radius() -> None:
    torch.manual_seed(0)
    net = network().eval()
    x = torch.randn(16, 1, 8, 8)
    scores = net(x)
    y = scores.argmax(1)
    assert lipschitz.bound(net[:-1]).value <= ROUNDING
    radius = lipschitz.certified_radius(scores, rows=net[-1].rows)
    assert (radius > 0).all()
    e = 0.01 * torch.randn_like(x)
    for _ in range(40):
        e = e.detach().requires_grad_()
        loss = lipschitz.margin_loss(net(x + e), y, margin=10.0)
        (gradient,) = torch.autograd.grad(loss, e)
        norm = gradient.flatten(1).norm(dim=1)[:, None, None, None]
        e = e + 0.2 * radius[:, None, None, None].detach() * gradient / norm.clamp(min=1e-12)
        e = (
            e
            * (0.999 * radius[:, None, None, None] / e.flatten(1).norm(dim=1)[:, None, None, None])
            .clamp(max=1)
            .detach()
        )
        assert torch.equal(net(x + e).argmax(1), y)


# The bound of a model.


def matrix(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    images = torch.eye(math.prod(shape)).reshape(-1, *shape)
    with torch.no_grad():
        return (layer(images) - layer(torch.zeros_like(images[:1]))).flatten(1).mT


LINEAR: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {  # and how tight the bound is
    "Linear": (lambda: nn.Linear(5, 4), (5,), 1.0001),
    "LinearSVD": (lambda: fasth.LinearSVD(5, 4, init="linear"), (5,), 1.0001),
    "LinearSymmetric": (lambda: fasth.LinearSymmetric(5), (5,), 1.0001),
    "LinearOrthogonal": (lambda: fasth.LinearOrthogonal(5, 4), (5,), 1.0001),
    "LinearUnitRows": (lambda: LinearUnitRows(5, 4), (5,), 1.0001),
    "parametrized": (lambda: fasth.parametrizations.orthogonal(nn.Linear(5, 4)), (5,), 1.0001),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3, **SAME), (3, 16, 16), 1.02),
    "Conv2d, even": (lambda: nn.Conv2d(3, 4, (2, 3), **SAME), (3, 12, 16), 1.05),
    "Conv2d, zeros": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 12, 12), 1.2),
    "Conv2d, stride and groups": (lambda: nn.Conv2d(4, 4, 3, 2, 1, groups=2), (4, 10, 10), 3.0),
    "Conv2d, patches": (lambda: nn.Conv2d(3, 4, 2, 2), (3, 6, 6), 2.1),
    "Conv2d, 1×1": (lambda: nn.Conv2d(3, 4, 1), (3, 3, 3), 1.0001),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 5, dilation=2, **SAME), (3, 40), 1.05),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1), (3, 8, 8), 3.0),
    "Conv2dSVD": (lambda: fasth.Conv2dSVD(3, 4, 3, padding=1), (3, 10, 10), 1.2),
    "Conv2dOrthogonal": (lambda: fasth.Conv2dOrthogonal(4, 6, 3, **SAME), (4, 4, 4), 1.0001),
    "ConvTranspose2dOrthogonal": (
        lambda: fasth.ConvTranspose2dOrthogonal(4, 6, 3, 1, 1, padding_mode="circular"), (4, 4, 4), 1.0001
    ),
    "Conv2dMapSVD": (lambda: fasth.Conv2dMapSVD(4, 4, 3, **SAME), (4, 4, 4), 1.0001),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3).eval(), (3, 2, 2), 1.0001),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), (1, 4, 4), 1.0001),
    "AvgPool2d, overlapping": (lambda: nn.AvgPool2d(3, 2, 1), (1, 7, 7), 2.0),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(1), (1, 2, 2), 3.0),
}  # fmt: skip


@pytest.mark.parametrize("name", LINEAR)
def test_bound_of_linear_maps(name: str) -> None:
    make, shape, tightness = LINEAR[name]
    torch.manual_seed(1)
    layer = make()
    with torch.no_grad():
        for buffer in layer.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 2)
        if hasattr(layer, "sigma"):
            layer.sigma.uniform_(0.3, 1.7)  # type: ignore[operator, union-attr]
    norm = torch.linalg.matrix_norm(matrix(layer, shape).double(), 2).item()
    found = lipschitz.bound(layer).value
    assert norm / ROUNDING <= found <= tightness * norm * ROUNDING


@pytest.mark.parametrize(
    "layer",
    [nn.ReLU(), nn.LeakyReLU(-2.0), nn.ELU(1.5), nn.PReLU(init=1.2), nn.Tanh(), nn.Sigmoid(), nn.Softplus(3.0),
     nn.Softmax(-1), nn.MaxPool2d(2), nn.MaxPool2d(3, 1, 1), nn.Hardtanh(), nn.Softsign(), nn.LogSigmoid(), nn.ReLU6(),
     nn.PixelUnshuffle(2), nn.Identity()],
    ids=repr,
)  # fmt: skip
def test_bound_of_activations(layer: nn.Module) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 4, 4, 4, dtype=torch.float64)
    found = attacked(layer.double(), x, 40)
    assert found <= lipschitz.bound(layer).value * ROUNDING


def test_bound_of_a_model_is_the_product_of_its_parts() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Sequential(nn.Linear(6, 4), nn.LeakyReLU(1.5)), Residual(nn.Linear(4, 4)), nn.Dropout()
    ).eval()
    found = lipschitz.bound(net)
    assert list(found.parts) == ["0.0", "0.1", "1", "2"]
    assert found.value == math.prod(found.parts.values()) and found.parts["0.1"] == 1.5
    inner = torch.linalg.matrix_norm(net[1].f.weight.double(), 2).item()
    assert found.parts["1"] == pytest.approx(0.5 + 0.5 * inner)
    assert str(found).splitlines()[1] == "0.1    1.5" and str(found).splitlines()[-1].startswith("bound  ")
    assert attacked(net.double(), torch.randn(1, 6, dtype=torch.float64)) <= found.value * ROUNDING


def test_modules_without_a_bound_are_named() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

    with pytest.raises(ValueError, match=r"known for 0\.1, .*Own: give it a method lipschitz_bound"):
        lipschitz.bound(nn.Sequential(nn.Sequential(nn.ReLU(), Own())))
    with pytest.raises(ValueError, match=r"known for the model, torch\.nn\.modules\.normalization\.LayerNorm"):
        lipschitz.bound(nn.LayerNorm(3))
    assert lipschitz.bound(nn.Sequential(Own()), rules={Own: lambda own: 3.0}).parts == {"0": 3.0}
    Own.lipschitz_bound = lambda self: lipschitz.bound(self.inner).value  # type: ignore[attr-defined]
    assert lipschitz.bound(own := Own()).value == lipschitz.bound(own.inner).value


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm2d(3), "1: BatchNorm2d should be in evaluation mode"),
        (nn.Dropout(), "1: Dropout should be in evaluation mode"),
        (nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), "1: `padding_mode` should be 'zeros' or 'circular'"),
        (nn.AdaptiveAvgPool2d(3), "1: `output_size` should be 1"),
        (nn.AvgPool2d(3, 2, ceil_mode=True), "1: windows at the border"),
        (nn.MaxPool2d(2, dilation=2), "1: `dilation` should be 1"),
    ],
)
def test_what_has_no_bound_is_an_error(layer: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lipschitz.bound(nn.Sequential(nn.ReLU(), layer))


def test_errors_of_calls() -> None:
    with pytest.raises(ValueError, match="should be a multiple of the group size 2; got shape"):
        GroupSort()(torch.randn(2, 3))
    for make in (lambda: GroupSort(0), lambda: NormPool2d(0), lambda: ScaledAvgPool2d(0)):
        with pytest.raises(ValueError, match="should be at least 1; got 0"):
            make()


def test_compiled_in_one_graph() -> None:
    net, x = (
        nn.Sequential(GroupSort(), Residual(nn.Tanh()), NormPool2d(2), nn.Flatten(), LinearUnitRows(8, 2)),
        torch.randn(1, 2, 4, 4),
    )
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x))
