"""The rules that were tried, as one optimizer written for reading: AdamW, in which reflectors may turn by angles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fasth.nn.held_weight import HeldWeight, named_held_weights
from fasth.optim.groups import LR, param_groups

BETAS, EPS = (0.9, 0.999), 1e-8


class Angles(torch.optim.Optimizer):
    """AdamW in which each tensor of reflectors moves by a given root mean square of its entries.

    Args:
        angle: that root mean square, at the peak of the schedule. None: a rate instead.
        power: the step is divided by (rms / 0.1) ** power, where rms is that of m̂/√v̂. 1 is the angle itself.
        sigma, reflectors: multiply the rates of sigma, lr·(√n + √m)/2, and of reflectors without an angle, lr.
        sigma_root, root: multiply them by √(0.003 / lr), so that they follow √lr.
        direction: "adam", m̂/√v̂; "momentum", m̂.
        bounded: multiplies the step of reflector i by min(1, rms σ₀ / |σᵢ|).
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        weight_decay: float,
        *,
        angle: float | None = None,
        power: float = 1.0,
        sigma: float = 1.0,
        sigma_root: bool = False,
        root: bool = False,
        direction: str = "adam",
        bounded: bool = False,
        reflectors: float = 1.0,
    ) -> None:
        groups = param_groups(model, lr=LR, weight_decay=weight_decay)  # where all rules are the same
        for group in groups:
            group["lr"] *= lr / LR
        sigma *= math.sqrt(LR / lr) if sigma_root else 1.0
        reflectors *= math.sqrt(LR / lr) if root else 1.0
        for group in groups:
            if group["name"] == "sigma":
                group["lr"] *= sigma
                group["weight_decay"] /= sigma
            elif group["name"] == "reflectors":
                group["lr"] *= reflectors
        super().__init__(groups, {"lr": lr})
        self.peaks = [group["lr"] for group in self.param_groups]
        self.angle = None if angle is None else angle
        self.power = power
        self.direction = direction
        self.held = {id(t): held for _, held in named_held_weights(model) for t in (held.U, held.V) if t is not None}
        self.start = {id(held.U): rms(held.singular_values.detach()) for _, held in named_held_weights(model)}
        self.bounded = bounded

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, peak in zip(self.param_groups, self.peaks, strict=True):
            for p in group["params"]:
                if p.grad is None:
                    continue
                direction = self.direction_of(p, group["name"] == "reflectors")
                p.mul_(1 - group["lr"] * group["weight_decay"])
                if group["name"] == "reflectors" and self.angle is not None:
                    size = 0.1 * (rms(direction) / 0.1) ** self.power
                    p.sub_(direction * self.weights(p) * (self.angle * group["lr"] / peak / max(size, 1e-30)))
                elif group["name"] == "reflectors":
                    p.sub_(group["lr"] * direction * self.weights(p))
                else:
                    p.sub_(group["lr"] * direction)

    def direction_of(self, p: Tensor, turns: bool) -> Tensor:
        state = self.state[p]
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["step"] += 1
        state["m"].lerp_(p.grad, 1 - BETAS[0])
        state["v"].lerp_(p.grad.square(), 1 - BETAS[1])
        m, v = (state[name] / (1 - beta ** state["step"]) for name, beta in zip("mv", BETAS, strict=True))
        if turns and self.direction == "momentum":
            return m
        return m / (v.sqrt() + EPS)

    def weights(self, p: Tensor) -> Any:
        """min(1, rms σ₀ / |σᵢ|) for the reflector that each entry belongs to."""
        held: HeldWeight = self.held[id(p)]
        if not self.bounded or held.sigma is None or held.form != "compact" or held.V is not None:
            return 1.0
        n, m = p.shape[-2:]
        i = torch.minimum(torch.arange(n).unsqueeze(1), torch.arange(m))
        sigma = held.singular_values.detach().abs().reshape(*p.shape[:-2], -1)
        return (self.start[id(held.U)] / sigma.clamp(min=1e-12)).clamp(max=1.0)[..., i.clamp(max=sigma.shape[-1] - 1)]


def rms(t: Tensor | Iterable[float]) -> float:
    t = torch.as_tensor(t)
    return t.norm().item() / math.sqrt(max(t.numel(), 1))
