"""The rules that were tried, as one optimizer written for reading: AdamW, in which reflectors may turn by angles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fasth.optim import LR, param_groups

BETAS, EPS = (0.9, 0.999), 1e-8


class Angles(torch.optim.Optimizer):
    """AdamW in which each tensor of reflectors moves by a given root mean square of its entries.

    Args:
        angle: that root mean square, at the peak of the schedule. None: a rate instead.
        sigma: multiplies the rate of sigma, lr·(√n + √m)/2.
        sigma_root, root: multiply the rate of sigma, or of the reflectors, by √(0.003 / lr), so that it follows √lr.
        power, base: multiply both by (base / lr)^(1 − power), so that they follow lr to the power.
        direction: "adam", m̂/√v̂; "momentum", m̂.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        weight_decay: float,
        *,
        angle: float | None = None,
        sigma: float = 1.0,
        sigma_root: bool = False,
        root: bool = False,
        power: float = 1.0,
        base: float = LR,
        direction: str = "adam",
    ) -> None:
        groups = param_groups(model, lr=LR, weight_decay=weight_decay)  # where all rules are the same
        for group in groups:
            group["lr"] *= lr / LR
        both = (base / lr) ** (1 - power)
        sigma *= both * (math.sqrt(LR / lr) if sigma_root else 1.0)
        for group in groups:
            if group["name"] == "sigma":
                group["lr"] *= sigma
                group["weight_decay"] /= sigma
            elif group["name"] == "reflectors":
                group["lr"] *= both * (math.sqrt(LR / lr) if root else 1.0)
        super().__init__(groups, {"lr": lr})
        self.peaks = [group["lr"] for group in self.param_groups]
        self.angle, self.direction = angle, direction

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, peak in zip(self.param_groups, self.peaks, strict=True):
            for p in group["params"]:
                if p.grad is None:
                    continue
                direction = self.direction_of(p, group["name"] == "reflectors")
                p.mul_(1 - group["lr"] * group["weight_decay"])
                if group["name"] == "reflectors" and self.angle is not None:
                    p.sub_(direction * (self.angle * group["lr"] / peak / max(rms(direction), 0.01)))
                else:
                    p.sub_(group["lr"] * direction)

    def direction_of(self, p: Any, turns: bool) -> Tensor:
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


def rms(t: Tensor) -> float:
    return t.norm().item() / math.sqrt(max(t.numel(), 1))
