"""The adapters, each with about as many parameters as LoRA of rank 4. Ours are fasth's, the others PEFT's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fasth
from fasth import adapters
from fasth.adapters.turning import Turning

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WEIGHT_DECAY = 0.0


class Method(NamedTuple):
    """``adapt`` changes the model in place and returns what is trained; ``groups`` are an optimizer's."""

    adapt: Callable[[Any], nn.Module]
    groups: Callable[[nn.Module, float], list[dict[str, Any]]]
    rotations: Callable[[nn.Module], list[Tensor]]  # the matrices Q of all layers, which should be orthogonal


def one_rate(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.requires_grad], "lr": lr}]


def known_rates(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    return fasth.param_groups(model, lr=lr)


def nothing(model: nn.Module) -> list[Tensor]:
    return []


def of_peft(config: str, rotate: bool, **options: Any) -> Method:
    """One of PEFT's adapters, computed by PEFT's own code."""

    def adapt(model: Any) -> nn.Module:
        import peft

        return peft.get_peft_model(model, getattr(peft, config)(target_modules=list(TARGETS), **options))

    def rotations(model: nn.Module) -> list[Tensor]:
        found = [
            layer for layer in model.modules() if hasattr(layer, "get_delta_weight") and hasattr(layer, "base_layer")
        ]
        return [layer.get_delta_weight("default") for layer in found]  # type: ignore[operator]

    return Method(adapt, one_rate, rotations if rotate else nothing)


def ours(kind: str, **options: Any) -> Method:
    def rotations(model: nn.Module) -> list[Tensor]:
        turnings = [module for module in model.modules() if isinstance(module, Turning)]
        turns = [turn for module in turnings for turn in (module.input, module.output) if turn is not None]
        return [turn(torch.eye(turn.features)).mT for turn in turns]

    return Method(lambda model: adapters.add(model, kind, target=TARGETS, **options), known_rates, rotations)


def everything(model: nn.Module) -> nn.Module:
    return model


METHODS: dict[str, Method] = {
    "all weights": Method(everything, one_rate, nothing),
    "LoRA": of_peft("LoraConfig", False, r=4, lora_alpha=4),
    "DoRA": of_peft("LoraConfig", False, r=4, lora_alpha=4, use_dora=True),
    "OFT": of_peft("OFTConfig", True, r=0, oft_block_size=16),
    "HRA": of_peft("HRAConfig", True, r=8),
    "reflections, both sides": ours("reflections", r=4, side="both"),
    "reflections": ours("reflections", r=8),
}
OURS = ("reflections, both sides", "reflections")
