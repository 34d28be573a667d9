"""The PyTorch path in wide blocks, as devices other than the CPU have them: few launches, and the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch.func import jvp, vmap

from fasth import LinearOrthogonal, LinearSVD, householder
from fasth.reflections import blocked, definition
from fasth.reflections.planner import block_size_by_rule
from fasth.tools.problems import (
    DIRECTIONS,
    assert_all_close,
    from_definition,
    nearly_parallel,
    with_gradients,
    zero_rows,
)
from fasth.tools.reproduce.counts import count, observed
from fasth.tools.reproduce.methods import COMPACT, FULL, TRIANGULAR

each_direction = pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda d: "-".join(k for k in d if d[k]) or "Q")
on_pytorch = pytest.mark.parametrize("path", ["pytorch"], indirect=True)

# Launches a block, and besides: of compact reflectors also the ones on the diagonal, and what keeps the signs there.
FORMS = {"full": (FULL, 9, 40), "triangular": (TRIANGULAR, 13, 40), "compact": (COMPACT, 13, 56)}


# Launches.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", [64, 768, 1000, 1024, 2048, 4096])
def test_launches_of_a_training_step(form, d):
    """Three products a block for the rows, three for their gradients, three for ∂Y; six launches to double T's size."""
    method, per_block, besides = FORMS[form]
    k = block_size_by_rule(d, on_cpu=False)
    doublings = ((k - 1) // 32).bit_length()
    padding = 2 if d % k else 0
    launches = count(method, d, 32).launches
    assert launches <= per_block * -(-d // k) + 6 * doublings + besides + padding
    assert launches <= 180 or d > 2048


LAYERS = {
    "LinearSVD": lambda n, m: LinearSVD(m, n, device="meta"),
    "LinearSVD, full": lambda n, m: LinearSVD(m, n, reflectors="full", device="meta"),
    "LinearOrthogonal": lambda n, m: LinearOrthogonal(m, n, device="meta"),
    "LinearOrthogonal, full": lambda n, m: LinearOrthogonal(m, n, reflectors="full", device="meta"),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sizes", [(768, 768), (1024, 1024), (2048, 2048), (1024, 700), (700, 1024)], ids=str)
def test_launches_of_forming_a_weight(sizes, layer):
    """Includes all gradients: 264 launches in blocks of reflections for a square LinearSVD of 1024."""
    made = LAYERS[layer](*sizes)
    with observed() as launched:
        W = made.weight
        torch.autograd.grad(W, [p for p in made.parameters() if p.requires_grad], W.detach(), allow_unused=True)
    assert len(launched) <= 60, launched


def test_launches_do_not_depend_on_the_number_of_rows():
    few = count(FULL, 1024, 8).launches
    assert count(FULL, 1024, 100).launches == few
    assert count(FULL, 1024, 300).launches <= few + 2  # the states are not saved: more rows, in the same products


def test_blocks_are_few_and_can_be_halved():
    for r in (*range(300), 512, 784, 1000, 1025, 2048, 10_000):
        k = block_size_by_rule(r, on_cpu=False)
        assert 1 <= k <= min(256, max(r, 1)) and -(-r // k) <= max(4, -(-r // 192))
        while k > 32:
            assert k % 2 == 0
            k //= 2


# Numbers.

REFLECTORS = {
    "gaussian": lambda V: V,
    "zero rows": zero_rows,
    "repeated": lambda V: V[:1].expand_as(V).clone(),
    "nearly parallel": nearly_parallel,
}


@on_pytorch
@each_direction
@pytest.mark.parametrize("reflectors", REFLECTORS)
@pytest.mark.parametrize(
    ("r", "d", "k"),
    [(64, 70, 64), (66, 66, 33), (96, 100, 96), (130, 131, 128), (250, 250, 250), (300, 257, 256), (270, 300, 68)],
)
def test_wide_blocks(r, d, k, reflectors, direction, path, device):
    """Halved down to masks, halved to an odd number, ragged, and more reflections than dimensions."""
    x, V = (torch.randn(n, d, dtype=torch.float64, device=device) for n in (4, r))
    x, V = x.requires_grad_(), REFLECTORS[reflectors](V).requires_grad_()
    expected = with_gradients(from_definition, x, V, **direction)
    actual = with_gradients(householder, x, V, block_size=k, **direction)
    assert_all_close(actual, expected, V.triu() if direction["triangular"] else V)


@on_pytorch
@pytest.mark.parametrize("rows", [4, 100], ids=["states saved", "states computed again"])
def test_wide_blocks_of_a_batch(rows, dtype, path, device):
    x, V = (torch.randn(3, n, 130, device=device).to(dtype).requires_grad_() for n in (rows, 130))
    expected = with_gradients(from_definition, x, V, triangular=True)
    assert_all_close(with_gradients(householder, x, V, triangular=True, block_size=66), expected, V.triu())


@on_pytorch
@pytest.mark.parametrize("d", [256, 1024])
@pytest.mark.parametrize("triangular", [False, True], ids=["full", "triangular"])
@pytest.mark.parametrize("reflectors", ["repeated", "nearly parallel", "drifting"])
def test_blocks_as_wide_as_the_rule_has_them_keep_Q_orthogonal(d, triangular, reflectors, path, device):
    """In float32, for reflectors that make T large: ‖QᵀQ − I‖₁ / (d·eps) below 30, as LAPACK's own tests ask for."""
    V = (REFLECTORS | {"drifting": lambda V: V.cumsum(0)})[reflectors](torch.randn(d, d, device=device))
    eye = torch.eye(d, device=device)
    Q = householder(eye, V, triangular=triangular, block_size=block_size_by_rule(d, on_cpu=False)).double()
    assert torch.linalg.matrix_norm(Q.mT @ Q - eye, 1) < 30 * d * torch.finfo(torch.float32).eps


@pytest.fixture
def halved_to_the_end(monkeypatch):
    monkeypatch.setattr(blocked, "_WIDEST_MASKS", 1)


@each_direction
@pytest.mark.parametrize("k", [2, 6, 8])
def test_every_derivative_of_the_halves(k, direction, halved_to_the_end, device):
    x = torch.randn(3, 8, dtype=torch.float64, device=device, requires_grad=True)
    V = torch.randn(7, 8, dtype=torch.float64, device=device, requires_grad=True)

    def ours(x, V):
        return householder(x, V, block_size=k, **direction)

    assert torch.autograd.gradcheck(ours, (x, V), fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, (x, V), fast_mode=True, check_fwd_over_rev=True)
    batch = torch.randn(2, 7, 8, dtype=torch.float64, device=device)
    actual, expected = (
        vmap(lambda V, f=f: jvp(lambda V: f(x, V), (V,), (V.flip(0),)))(batch)
        for f in (ours, lambda x, V: definition.householder(x, V, **direction))
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("exponent", [-1, -0.5, 0, 0.5, 0.95])
def test_the_scale_is_a_power_of_two(exponent, precise, device):
    """Covers subnormal numbers, which are divided by the smallest normal one, to large ones."""
    limits = torch.finfo(precise)
    scale = limits.tiny ** (-exponent) / 64 if exponent < 0 else limits.max**exponent
    V = torch.randn(1, 20, 20, dtype=torch.float64, device=device).mul(scale).to(precise)
    V[:, 3] = 0
    Y, scales = blocked.blocks_of(V, 20, False)
    assert torch.equal(Y.squeeze(1) * scales, V)
    assert (torch.frexp(scales).mantissa == 0.5).all()
    largest = Y.abs().amax(-1)
    assert (largest < 2).all() and torch.equal(largest >= 1, V.abs().amax(-1).unsqueeze(1) >= limits.tiny)
