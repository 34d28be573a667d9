"""Other optimizers: Lion for every parameter, and Muon for dense matrices beside AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fasth


class Lion(torch.optim.Optimizer):
    """Every number moves by the rate, with the sign of a mean of gradients: Chen et al., 2023."""

    def __init__(self, params: Any, lr: float = 1e-4, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(group["lr"] * torch.lerp(m, p.grad, 0.1).sign())
                    m.lerp_(p.grad, 0.01)


class MuonBesideAdamW(torch.optim.Optimizer):
    """Muon for the dense matrices of the blocks, with steps as large as AdamW's, and AdamW for all else."""

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        hidden = {p for name, p in model.named_parameters() if name.startswith("blocks") and name.endswith("weight")}
        groups = fasth.param_groups(model, lr=lr, weight_decay=weight_decay)
        dense = [p for group in groups if group["name"] == "dense" for p in group["params"] if p in hidden]
        for group in groups:
            group["params"] = [p for p in group["params"] if group["name"] != "dense" or p not in hidden]
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        rest = [group for group in groups if group["params"]]
        self.both: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, **options)]
        if dense:
            self.both.append(torch.optim.Muon(dense, adjust_lr_fn="match_rms_adamw", **options))
        # The same dicts, so that a schedule of this optimizer sets the rates of both.
        super().__init__([group for one in self.both for group in one.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.both:
            one.step()
