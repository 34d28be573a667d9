"""Flows with reflectors for each sample, beside the same with one reflection after another in PyTorch's operations.

A step is forward with the log-determinant, and backward to all tensors that an encoder would make. The loop works on
the whole batch, and normalises all reflectors at once. The answers are compared before they are timed. Single calls are
timed in turns; the last column is the ratio of medians.
Run: python benchmarks/flow_layers.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fasth.flows import HouseholderTransform, QRTransform, SylvesterTransform
from fasth.tools.timing import compare

Flow = Callable[..., tuple[Tensor, Tensor]]
LARGEST = 1 << 23  # entries of V; the loop saves five times as many for backward


def householder(x: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    transform = HouseholderTransform(V)
    y = transform(x)
    return y, transform.log_abs_det_jacobian(x, y)


def householder_loop(x: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    y = reflected(x, reversed(F.normalize(V, dim=-1).unbind(-2)))
    return y, y.new_zeros(y.shape[:-1])


def sylvester(x: Tensor, V: Tensor, R1: Tensor, R2: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return SylvesterTransform.from_unconstrained(V, R1, R2, bias).call_and_ladj(x)


def sylvester_loop(x: Tensor, V: Tensor, R1: Tensor, R2: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    M, reflectors = bias.shape[-1], F.normalize(V, dim=-1).unbind(-2)
    first, second = (0.999 * R.diagonal(dim1=-2, dim2=-1).tanh() for R in (R1, R2))
    w = reflected(x, reflectors)[..., :M]
    inner = torch.bmm(R2.triu(1) + second.diag_embed(), w.unsqueeze(-1)).squeeze(-1)
    hidden = torch.tanh(inner + bias)
    outer = torch.bmm(R1.triu(1) + first.diag_embed(), hidden.unsqueeze(-1)).squeeze(-1)
    y = x + reflected(F.pad(outer, (0, x.shape[-1] - M)), reversed(reflectors))
    return y, torch.log1p(first * second * (1 - hidden.square())).sum(-1)


def qr(x: Tensor, V: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    transform = QRTransform(V, R)
    y = transform(x)
    return y, transform.log_abs_det_jacobian(x, y)


def qr_loop(x: Tensor, V: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    logarithms = R.diagonal(dim1=-2, dim2=-1)
    triangle = R.triu(1) + logarithms.exp().diag_embed()
    y = torch.bmm(triangle, x.unsqueeze(-1)).squeeze(-1)
    return reflected(y, reversed(F.normalize(V, dim=-1).unbind(-2))), logarithms.sum(-1)


def reflected(x: Tensor, unit_reflectors: Sequence[Tensor] | reversed[Tensor]) -> Tensor:
    for v in unit_reflectors:
        x = x - 2 * (v * x).sum(-1, keepdim=True) * v
    return x


FLOWS: dict[str, tuple[Flow, Flow]] = {
    "Householder": (householder, householder_loop),
    "Sylvester": (sylvester, sylvester_loop),
    "QR": (qr, qr_loop),
}


def inputs(name: str, batch: int, d: int, r: int, M: int) -> list[Tensor]:
    beside = {"Householder": [], "Sylvester": [(batch, M, M), (batch, M, M), (batch, M)], "QR": [(batch, d, d)]}
    shapes = [(batch, d), (batch, r, d), *beside[name]]
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def step(flow: Flow, tensors: list[Tensor]) -> list[Tensor]:
    y, ladj = flow(*tensors)
    loss = y.square().sum() + (y[..., 0] - ladj).sum()
    return [y.detach(), ladj.detach(), *torch.autograd.grad(loss, tensors)]


def verified(flows: tuple[Flow, Flow], tensors: list[Tensor]) -> dict[str, Callable[[], object]]:
    """The steps of both, which agree in float64 to rounding."""
    precise = [t.detach().double().requires_grad_() for t in tensors]
    found, expected = (step(flow, precise) for flow in flows)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    ours, loop = flows
    return {"fasth": lambda: step(ours, tensors), "loop": lambda: step(loop, tensors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--reflectors", type=int, nargs="+", default=[8, 32], help="and as many as the size")
    parser.add_argument("--hidden", type=int, default=32, help="Sylvester's M")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"training step, float32, {torch.get_num_threads()} threads; Sylvester with M = {options.hidden}")
    print(f"{'flow':>12} {'batch':>6} {'d':>5} {'r':>5} {'loop, ms':>10} {'fasth, ms':>10} {'times faster':>13}")
    for name, flows in FLOWS.items():
        for batch in options.batches:
            for d in options.sizes:
                for r in sorted({*options.reflectors, d}):
                    if batch * r * d <= LARGEST:
                        show(name, flows, batch, d, r, min(options.hidden, d), options.rounds)


def show(name: str, flows: tuple[Flow, Flow], batch: int, d: int, r: int, M: int, rounds: int) -> None:
    calls = verified(flows, inputs(name, batch, d, r, M))
    ours, loop = (timing.median for timing in compare(calls, device=torch.device("cpu"), rounds=rounds, min_time=1e-9))
    print(
        f"{name:>12} {batch:>6} {d:>5} {r:>5} {loop * 1e3:>10.3f} {ours * 1e3:>10.3f} {loop / ours:>13.2f}", flush=True
    )


if __name__ == "__main__":
    main()
