"""The networks of the judging tasks, with plain layers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def regressor(inputs: int, outputs: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def autoencoder(pixels: int, width: int) -> nn.Module:
    """Down to 32 numbers and up again."""
    sizes = (pixels, width, width // 2, 32, width // 2, width, pixels)
    layers: list[nn.Module] = [nn.Flatten()]
    for n, m in pairwise(sizes):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class ResNet(nn.Module):
    """Three residual blocks of two 3×3 convolutions with batch norm, on every second pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width // 2, 3, 2, 1, bias=False), nn.BatchNorm2d(width // 2), nn.ReLU())
        self.blocks = nn.Sequential(Residual(width // 2, width), Residual(width, width), Residual(width, width, 1))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images.unsqueeze(1))).mean((-2, -1)))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 2) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.skip: nn.Module = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.skip(x) + self.norms[1](self.second(y)))


class Characters(nn.Module):
    """An LSTM over characters, and a layer to the next one."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(codes))[0])


class GPT(nn.Module):
    """A causal transformer over characters, with one matrix for queries, keys and values."""

    def __init__(self, characters: int, width: int, context: int, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(codes) + self.positions[: codes.shape[1]])))


class ViT(nn.Module):
    """A transformer over the 16 parts of an image, each 7 × 7 pixels."""

    def __init__(self, pixels: int, width: int, layers: int = 2) -> None:
        super().__init__()
        self.size = pixels // 4
        self.embedding = nn.Linear(self.size**2, width)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        whole = 4 * self.size
        parts: Any = images[:, :whole, :whole].unflatten(2, (4, -1)).unflatten(1, (4, -1)).transpose(2, 3)
        x = self.embedding(parts.reshape(len(images), 16, -1)) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class Block(nn.Module):
    def __init__(self, width: int, causal: bool, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))
