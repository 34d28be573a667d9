"""The networks of the study, with plain layers; methods.py converts them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(inputs: int, width: int, layers: int = 3, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Hidden layers without norms, and a layer to ten classes."""
    hidden: list[nn.Module] = []
    for i in range(layers):
        hidden += [nn.Linear(width if i else inputs, width), activation()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


def convnet(width: int) -> nn.Module:
    """Three 3×3 convolutions, the first two with stride 2, a mean over positions, and a layer to ten classes."""
    return nn.Sequential(
        nn.Unflatten(1, (1, -1)),
        nn.Conv2d(1, width // 2, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(width // 2, width, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, 1, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


class Transformer(nn.Module):
    """A causal transformer over characters, with norms before attention and before the two layers of a block."""

    def __init__(self, characters: int, width: int, context: int, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes) + self.positions[: codes.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Block(nn.Module):
    """x + attention(x), then x + down(gelu(up(x))), each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Recurrent(nn.Module):
    """An Elman net that reads an image row by row, and a layer from its last state to ten classes."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(inputs, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.rnn(images)[1][-1])


class Flow(nn.Module):
    """A normalizing flow of vectors: linear maps and affine couplings in turns.

    ``swap_couplings`` says whether the layers inside the couplings, too, are those that methods replace.
    """

    def __init__(self, features: int, width: int, blocks: int = 4, swap_couplings: bool = False) -> None:
        super().__init__()
        self.swap_couplings = swap_couplings
        self.mixers = nn.ModuleList(nn.Linear(features, features) for _ in range(blocks))
        self.couplings = nn.ModuleList(Coupling(features, width) for _ in range(blocks))
        for mixer in self.mixers:
            nn.init.orthogonal_(mixer.get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        """−log p(x): (rows,)."""
        logdet = x.new_zeros(())
        for mixer, coupling in zip(self.mixers, self.couplings, strict=True):
            x, scales = coupling(mixer(x))
            logdet = logdet + logabsdet(mixer) + scales
        return 0.5 * x.square().sum(-1) + 0.5 * x.shape[-1] * math.log(2 * math.pi) - logdet


def logabsdet(layer: Any) -> Tensor:
    """log |det W| of a square layer, computed by ``slogdet`` if it is plain."""
    return torch.linalg.slogdet(layer.weight).logabsdet if isinstance(layer, nn.Linear) else layer.logabsdet()


class Coupling(nn.Module):
    """y₁ = x₁, y₂ = x₂ · s(x₁) + t(x₁), with s between e⁻² and e². Returns y and Σ log s."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        half = features // 2
        self.net = nn.Sequential(nn.Linear(half, width), nn.ReLU(), nn.Linear(width, 2 * (features - half)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fixed, changed = x.tensor_split([x.shape[-1] // 2], -1)
        log_scale, shift = self.net(fixed).chunk(2, -1)
        log_scale = 2 * torch.tanh(log_scale / 2)
        return torch.cat((fixed, changed * log_scale.exp() + shift), -1), log_scale.sum(-1)


def layers(model: nn.Module) -> list[str]:
    """The names of the layers that methods replace: all layers with a weight; in a flow, its linear maps."""
    kinds = (nn.Linear, nn.Conv2d, nn.RNN)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    if isinstance(model, Flow) and not model.swap_couplings:
        return [name for name in names if name.startswith("mixers")]
    return names


def hidden_layers(model: nn.Module) -> list[str]:
    """The names of the layers that can be orthogonal: all that methods replace, except the last one."""
    names = layers(model)
    return [name for name in names if name.startswith("mixers")] if isinstance(model, Flow) else names[:-1]


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
