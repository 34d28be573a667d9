"""Layers with a Lipschitz constant of 1."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth.nn.factored import at_least_one, check_dtype


class GroupSort(nn.Module):
    """Sorts the channels within groups, in ascending order: (*, channels, *) → the same shape.

    Sorting is a permutation, so it keeps the norm of the input and the norm of the gradient; ReLU reduces both. With
    ``size`` = 2, the default, this is MaxMin (Anil, Lucas & Grosse, 2019).

    Args:
        size: number of channels in a group; it divides the number of channels.
        dim: dimension of the channels.
    """

    def __init__(self, size: int = 2, dim: int = 1) -> None:
        super().__init__()
        at_least_one(size=size)
        self.size, self.dim = size, dim

    def forward(self, input: Tensor) -> Tensor:
        """Sorts along ``dim`` in groups of ``size``."""
        if input.shape[self.dim] % self.size:
            raise ValueError(
                f"dimension {self.dim} of `input` should be a multiple of the group size {self.size}; "
                f"got shape {tuple(input.shape)}"
            )
        dim = self.dim % input.ndim
        groups = input.unflatten(dim, (-1, self.size))
        if self.size == 2:  # faster than a sort
            first, second = groups.unbind(dim + 1)
            ordered = torch.stack((torch.minimum(first, second), torch.maximum(first, second)), dim + 1)
        else:
            ordered = groups.sort(dim + 1).values
        return ordered.flatten(dim, dim + 1)

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}"


class ScaledAvgPool2d(nn.Module):
    """k · mean over patches of k×k pixels: the orthogonal projection to images that are constant there.

    (*, c, H, W) → (*, c, ⌊H/k⌋, ⌊W/k⌋). ``nn.AvgPool2d`` has the norm 1/k. To keep the whole image,
    use ``nn.PixelUnshuffle`` or an orthogonal convolution with a stride.
    """

    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        at_least_one(kernel_size=kernel_size)
        self.kernel_size = kernel_size

    def forward(self, input: Tensor) -> Tensor:
        """The scaled mean of each patch."""
        return self.kernel_size * F.avg_pool2d(input, self.kernel_size)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}"


class NormPool2d(nn.Module):
    """‖patch‖₂ of patches of k×k pixels: (*, c, H, W) → (*, c, ⌊H/k⌋, ⌊W/k⌋). It keeps the norm of the image.

    The gradient of a patch of zeros is zero.
    """

    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        at_least_one(kernel_size=kernel_size)
        self.kernel_size = kernel_size

    def forward(self, input: Tensor) -> Tensor:
        """The norm of each patch."""
        k = self.kernel_size
        height, width = (size // k * k for size in input.shape[-2:])
        patches = input[..., :height, :width].unflatten(-1, (-1, k)).unflatten(-3, (-1, k))
        return torch.linalg.vector_norm(patches, dim=(-3, -1))

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}"


class Residual(nn.Module):
    """α x + (1 − α) f(x) with a trained α in (0, 1), initially 1/2. It is 1-Lipschitz if f is.

    x + f(x) would have a constant of up to 2.
    """

    def __init__(self, *f: nn.Module) -> None:
        super().__init__()
        self.f = f[0] if len(f) == 1 else nn.Sequential(*f)
        self.raw = nn.Parameter(torch.zeros(()))

    @property
    def alpha(self) -> Tensor:
        """α, the weight of the input: a scalar."""
        return self.raw.sigmoid()

    def forward(self, input: Tensor) -> Tensor:
        """The convex combination of ``input`` and f(input), which has the shape of ``input``."""
        return torch.lerp(self.f(input), input, self.alpha.to(input.dtype))


class LinearUnitRows(nn.Linear):
    """x Wᵀ + bias with rows of W of norm 1: each output is 1-Lipschitz, and its direction is free.

    Use it as the last layer of a classifier: see ``certified_radius``. ``nn.Linear``'s signature; ``weight`` holds the
    rows before they are divided by their norms.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_dtype(dtype)
        super().__init__(in_features, out_features, bias, device, dtype)

    @property
    def rows(self) -> Tensor:
        """W: (out, in), differentiable. Rows of ``weight`` shorter than 1e-12 give rows of W shorter than 1."""
        return F.normalize(self.weight, dim=1)

    def forward(self, input: Tensor) -> Tensor:
        """(*, in) → (*, out)."""
        return F.linear(input, self.rows, self.bias)
