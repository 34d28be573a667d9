"""AdamW whose steps turn U and V by angles: the size of a step of reflectors does not depend on the learning rate."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasth.optim.groups import REFLECTORS, param_groups

__all__ = ["AdamW"]

LEAST = 0.01  # a smaller rms of m̂/√v̂ is scaled as this one: without a gradient m̂ and the angle go to 0


class AdamW(torch.optim.AdamW):
    """AdamW for a model that has SVDs: steps turn reflectors by an angle, other parameters as ``torch.optim.AdamW``.

    With Adam's direction d = m̂ / (√v̂ + ε) of a tensor of reflectors Y, and a schedule that is at lr / peak:

        Y ← Y − angle · (lr / peak) · d / max(rms(d), 0.01)

    so that the entries of Y move by ``angle`` in the root mean square, whatever lr is: 0.0014 for compact reflectors of
    a weight of full rank with singular values to train. All other parameters have the rates of ``fasth.param_groups``.
    ``peak`` is the rate that this optimizer is made with. A schedule scales the angle as it scales lr, also from 0.
    ``docs/training.md`` compares it with ``param_groups``, which is what we recommend.

    The state is the same as ``torch.optim.AdamW``'s. A step takes twice the time of ``torch.optim.AdamW``'s.

    Args:
        model: a module, or groups that ``fasth.param_groups`` made.
        lr: the rate of a dense network.
        betas, eps, weight_decay: as in ``torch.optim.AdamW``. Reflectors, biases and norms do not decay.
        reflectors: multiplies the angle. For groups it is an argument of ``fasth.param_groups``.
        options: other options of ``torch.optim.AdamW``, such as ``fused=True``.

    Example:
        >>> model = fasth.to_svd(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
        >>> optimizer = fasth.optim.AdamW(model, lr=1e-3, weight_decay=0.01)
    """

    turns_by_angles = True  # asks ``fasth.param_groups`` for angles

    def __init__(
        self,
        model: nn.Module | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        reflectors: float = 1.0,
        **options: Any,
    ) -> None:
        if isinstance(model, nn.Module):
            groups = param_groups(model, lr=lr, weight_decay=weight_decay, optimizer=AdamW, reflectors=reflectors)
        else:
            groups = _checked(model, reflectors)
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, such as one that ``fasth.param_groups`` made for a layer added later."""
        super().add_param_group(param_group)
        _set_peak(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            _set_peak(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. ``closure`` computes the loss and its gradients, and is called once, before the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        turns = [
            _Turn(p, p.clone(), group) for group in self.param_groups if group.get("angle") for p in _trained(group)
        ]
        try:
            # Torch's own step starts from reflectors of 0, so that afterwards they are −lr·d without rounding.
            for turn in turns:
                turn.p.zero_()
            # Unwrapped: the hooks of this optimizer are already called by the wrapper of our own step.
            inspect.unwrap(torch.optim.AdamW.step)(self)
        except BaseException:
            for turn in turns:
                turn.p.copy_(turn.start)
            raise
        for turn, norm in zip(turns, _norms([turn.p for turn in turns]), strict=True):
            turn.finish(norm)
        return loss


class _Turn(NamedTuple):
    p: Tensor  # reflectors
    start: Tensor  # their values before the step
    group: dict[str, Any]

    def finish(self, norm: Tensor) -> None:
        """p = start + angle · (lr / peak) · p / max(rms, …), where p is −lr·d and ``norm`` is ‖p‖."""
        lr, peak = self.group["lr"], self.group["peak"]
        reach = lr * math.sqrt(self.p.numel())  # the norm if every entry of d were ±1
        if reach == 0:
            self.p.copy_(self.start)
            return
        scale = (self.group["angle"] * reach / peak) / norm.clamp(min=LEAST * reach)
        p, start = _local(self.p), _local(self.start)
        torch.addcmul(start, p, scale.to(p.dtype), out=p)


def _trained(group: dict[str, Any]) -> list[Tensor]:
    return [p for p in group["params"] if p.grad is not None]


def _local(t: Any) -> Tensor:
    """The local shard of a DTensor; any other tensor itself."""
    return t.to_local() if hasattr(t, "to_local") else t


def _norms(tensors: list[Any]) -> list[Tensor]:
    """Each tensor's Frobenius norm, in float32 at least. Norms of sharded tensors are reduced together."""
    norms = [torch.linalg.vector_norm(_local(t), dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    sharded: dict[Any, list[int]] = defaultdict(list)
    for i, t in enumerate(tensors):
        if hasattr(t, "to_local"):
            sharded[t.device_mesh, t.placements].append(i)
    for (mesh, placements), indices in sharded.items():
        squares = torch.stack([norms[i].double().square() for i in indices])
        for i, square in zip(indices, _sum(squares, mesh, placements), strict=True):
            norms[i] = square.sqrt().to(norms[i].dtype)
    return norms


def _sum(values: Tensor, mesh: Any, placements: Any) -> Tensor:
    """The sum over the dimensions of the mesh along which a tensor with these placements is sharded."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    parts = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    return DTensor.from_local(values, mesh, parts, run_check=False).full_tensor()


def _set_peak(group: dict[str, Any]) -> None:
    if group.get("angle"):
        group.setdefault("peak", group.get("initial_lr", group["lr"]))


def _checked(model: Any, reflectors: float) -> list[dict[str, Any]]:
    """Checks groups that are passed in place of a model, and returns them as a list."""
    groups = list(model) if isinstance(model, Iterable) else [model]
    if not groups or not all(isinstance(group, dict) for group in groups):
        found = (
            type(model).__name__
            if not groups or not isinstance(model, list)
            else f"a list of {type(groups[0]).__name__}"
        )
        raise TypeError(f"`model` should be a torch.nn.Module, or groups of fasth.param_groups; got {found}")
    if reflectors != 1:
        raise ValueError("`reflectors` should be given to fasth.param_groups, which made these groups; got it here")
    if any(group.get("name") == REFLECTORS and "angle" not in group for group in groups):
        raise ValueError(
            "groups should be made with param_groups(…, optimizer=fasth.optim.AdamW); got some without angles"
        )
    return groups
