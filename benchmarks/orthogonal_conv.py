"""Orthogonal 3×3 convolutions beside ``nn.Conv2d`` and those of other libraries: speed, and exactness after training.

    --speed       a training step, 16 images, circular padding                    conv/speed.md
    --rule        rotations and shifts applied to pixels, beside the kernel        conv/rule.md
    --exactness   singular values of the map after 10⁴ steps at a high rate       conv/exactness.md
    --inverse     Conv2dMapSVD's beside the sequential solve of emerging ones      conv/inverse.md

Peers, of which those that are installed are compared: orthogonium (AOC, and of its legacy folder Cayley and SOC, which
need einops) and deel-torchlip. ``make readme`` puts the tables into docs/convolutions.md.

Run: python benchmarks/orthogonal_conv.py --speed
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fasth
from fasth import _files
from fasth.nn import image_map
from fasth.tools.environment import describe
from fasth.tools.reproduce.tables import Table, markdown
from fasth.tools.timing import Timing, compare

sys.path.append(str(Path(__file__).parents[1]))
from experiments.lipschitz.networks import ReshapedKernel

FOLDER = Path(__file__).parent / "conv"
IMAGES, CHANNELS, SIZES = 16, (64, 128, 256), (32, 16)
RATES = (0.1,)  # of --exactness
SAME: dict[str, Any] = {"padding": "same", "padding_mode": "circular"}


class OnCPU(TorchFunctionMode):
    """Leaves tensors on the CPU that code puts on a GPU by name, as SOC's does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def aoc(c: int) -> nn.Module:
    from orthogonium.layers.conv.AOC import AdaptiveOrthoConv2d

    return AdaptiveOrthoConv2d(c, c, 3)


def torchlip(c: int) -> nn.Module:
    from deel.torchlip import SpectralConv2d

    return SpectralConv2d(c, c, 3, padding=1, padding_mode="circular")


def cayley(c: int) -> nn.Module:
    from orthogonium.legacy.cayley_ortho_conv import Cayley

    return Cayley(c, c, 3)


def soc(c: int) -> nn.Module:
    from orthogonium.legacy.skew_ortho_conv import SOC

    with OnCPU():
        return SOC(c, c)


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "nn.Conv2d": lambda c: nn.Conv2d(c, c, 3, **SAME),
    "fasth": lambda c: fasth.Conv2dOrthogonal(c, c, 3, **SAME),
    "AOC": aoc,
    "deel-torchlip": torchlip,
    "Cayley": cayley,
    "SOC": soc,
}
NEEDS = {"AOC": "orthogonium", "deel-torchlip": "deel", "Cayley": "einops", "SOC": "einops"}


def installed() -> list[str]:
    return [name for name in LAYERS if name not in NEEDS or find_spec(NEEDS[name])]


def singular_values(layer: Any, size: int = 32) -> Tensor:
    """Singular values, in float64, of a layer's kernel as a circular map of images of size × size pixels."""
    kernel = layer.weight.detach().double()
    return torch.linalg.svdvals(torch.fft.rfft2(kernel, s=(size, size)).permute(2, 3, 0, 1))


def kept(layer: nn.Module, c: int) -> float:
    """| ‖layer(x) − layer(0)‖ / ‖x‖ − 1 |, for layers without a kernel."""
    x = torch.randn(2, c, 32, 32)
    return abs(((layer(x) - layer(torch.zeros_like(x))).norm() / x.norm()).item() - 1)


def step_of(layer: Callable[[Tensor], Tensor], c: int, size: int, images: int = IMAGES) -> Callable[[], None]:
    """A training step without the optimizer: forward, and the gradients of input and parameters."""
    x, g = torch.randn(images, c, size, size, requires_grad=True), torch.randn(images, c, size, size)

    def step() -> None:
        layer(x).backward(g)

    return step


def measure(calls: dict[str, Callable[[], None]], rounds: int, time_limit: float) -> dict[str, Timing]:
    found = compare(calls, device=torch.device("cpu"), rounds=rounds, min_time=0, time_limit=time_limit)
    return {timing.name: timing for timing in found}


def speed(options: argparse.Namespace) -> Table:
    names, rows = installed(), []
    for c in options.channels:
        layers = {name: LAYERS[name](c) for name in names}
        exact = (singular_values(layers["fasth"]) - 1).abs().max().item()
        if exact > 1e-5 or kept(layers["fasth"], c) > 1e-5:
            raise SystemExit(f"wrong: fasth with {c} channels should be orthogonal; it is off by {exact:.1e}")
        ours = layers["fasth"]
        for size in SIZES:
            if "Cayley" in layers:
                layers["Cayley"] = cayley(c)  # it is for images of the size that it sees first
            calls = {name: step_of(layer, c, size) for name, layer in layers.items()}
            if size == SIZES[0]:
                kernel, g = ours._form, torch.randn(c, c, 3, 3)
                calls["kernel"] = lambda kernel=kernel, g=g: kernel().backward(g)
            found = measure(calls, options.rounds, options.time_limit)
            if size == SIZES[0]:
                of_kernel = f"{1e3 * found['kernel'].median:.1f}"
            cells = [f"{found[name].ratio(found['nn.Conv2d']):.2f}" for name in names[1:]]
            rows.append([str(c), f"{size}×{size}", f"{1e3 * found['nn.Conv2d'].median:.1f}", *cells, of_kernel])
            print(*rows[-1], flush=True)
    columns = ["channels", "image", "nn.Conv2d, ms", *(f"{name}, times" for name in names[1:]), "fasth's kernel, ms"]
    return Table(f"A training step, 3×3, {IMAGES} images", columns, rows)


def rule(options: argparse.Namespace) -> Table:
    """Pixels per channel against the times of both ways, relative to ``nn.Conv2d``."""
    rows = []
    for c in options.channels:
        layers = {"nn.Conv2d": LAYERS["nn.Conv2d"](c), "fasth": LAYERS["fasth"](c)}
        for per_channel in (1, 4, 16, 32, 64):
            images = max(1, c * per_channel // 64)
            step = step_of(layers["fasth"], c, 8, images)
            calls = {"nn.Conv2d": step_of(layers["nn.Conv2d"], c, 8, images)}
            calls |= {name: with_most(most, step) for name, most in (("kernel", 0), ("pixels", 1 << 40))}
            found = measure(calls, options.rounds, options.time_limit)
            ratios = [found[name].ratio(found["nn.Conv2d"]) for name in ("kernel", "pixels")]
            rows.append([str(c), str(images * 64), str(per_channel), *(f"{ratio:.2f}" for ratio in ratios)])
            print(*rows[-1], flush=True)
    columns = [
        "channels",
        "pixels",
        "pixels per channel",
        "kernel formed, times",
        "rotations and shifts applied, times",
    ]
    return Table("A training step, 3×3, images of 8×8, times that of nn.Conv2d", columns, rows)


def with_most(most: int, step: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        before, image_map.MOST_PIXELS = image_map.MOST_PIXELS, most
        try:
            step()
        finally:
            image_map.MOST_PIXELS = before

    return call


def exactness(options: argparse.Namespace) -> Table:
    """A regression of random images by Adam, at a rate at which parameters turn through all angles."""
    c, rows = 8, []
    layers: dict[str, Callable[[], nn.Module]] = {"fasth": lambda: LAYERS["fasth"](c)}
    if "AOC" in installed():
        layers["AOC"] = lambda: aoc(c)
    layers["reshaped kernel"] = lambda: ReshapedKernel(c, c, 1)
    for name, make in layers.items():
        for rate in RATES:
            torch.manual_seed(0)
            layer: Any = make()
            before = spread(layer)
            optimizer = torch.optim.Adam(layer.parameters(), lr=rate)
            x, y = torch.randn(2, 4, c, 8, 8)
            for _ in range(options.steps):
                optimizer.zero_grad()
                (layer(x) - y).square().mean().backward()
                optimizer.step()
            rows.append([f"**{name}**" if name == "fasth" else name, f"{rate:g}", *before, *spread(layer)])
            print(*rows[-1], flush=True)
    columns = [
        "layer",
        "rate",
        *(f"{what} σ − 1, {when}" for when in ("new", "trained") for what in ("least", "largest")),
    ]
    return Table(f"σ of the map after {options.steps:,} steps of Adam, 3×3, {c} channels, float32", columns, rows)


class Emerging(nn.Module):
    """Two autoregressive 3×3 convolutions in opposite orders of pixels (Hoogeboom et al., 2019), with zero padding."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.kernels = [self._kernel(c), self._kernel(c)]

    @staticmethod
    def _kernel(c: int) -> Tensor:
        """Taps before the middle one as they are; the middle one lower triangular."""
        kernel = torch.randn(c, c, 3, 3) / (3 * c**0.5) / 4
        kernel[:, :, 1, 2:], kernel[:, :, 2] = 0, 0
        kernel[:, :, 1, 1] = kernel[:, :, 1, 1].tril(-1) + torch.eye(c)
        return kernel

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.kernels
        y = nn.functional.conv2d(x, first, padding=1)
        return nn.functional.conv2d(y.flip(-1, -2), second, padding=1).flip(-1, -2)

    def inverse(self, y: Tensor) -> Tensor:
        first, second = self.kernels
        return self._solved(self._solved(y.flip(-1, -2), second).flip(-1, -2), first)

    @staticmethod
    def _solved(y: Tensor, kernel: Tensor) -> Tensor:
        """Pixel after pixel: a product with the taps of pixels that are known, and a triangular solve."""
        x = nn.functional.pad(torch.zeros_like(y), (1, 1, 1, 0))
        known, middle = kernel[:, :, :2].flatten(1).clone(), kernel[:, :, 1, 1]
        known[:, 4::6], known[:, 5::6] = 0, 0
        for i in range(y.shape[2]):
            for j in range(y.shape[3]):
                rest = y[:, :, i, j] - x[:, :, i : i + 2, j : j + 3].flatten(1) @ known.mT
                x[:, :, i + 1, j + 1] = torch.linalg.solve_triangular(middle, rest.mT, upper=False).mT
        return x[:, :, 1:, 1:-1]


@torch.no_grad()
def inverse(options: argparse.Namespace) -> Table:
    rows = []
    for c, size in ((4, 14), (16, 7), (12, 16), (48, 8)):
        layers = {"fasth": fasth.Conv2dMapSVD(c, c, 3, 1, "same", padding_mode="circular"), "emerging": Emerging(c)}
        x, calls = torch.randn(64, c, size, size), {}
        for name, layer in layers.items():
            y = layer(x)
            if (error := (layer.inverse(y) - x).abs().max().item()) > 1e-3:
                raise SystemExit(f"wrong: the inverse of {name} is off by {error:.1e}")
            calls[name] = lambda layer=layer, y=y: layer.inverse(y)
        found = measure(calls, options.rounds, options.time_limit)
        ours, theirs = (1e3 * found[name].median for name in layers)
        rows.append([str(c), f"{size}×{size}", f"{ours:.2f}", f"{theirs:.1f}", f"{theirs / ours:.0f}"])
        print(*rows[-1], flush=True)
    columns = ["channels", "image", "Conv2dMapSVD, ms", "emerging, ms", "ratio"]
    return Table("The inverse of a 3×3 convolution, 64 images", columns, rows)


def spread(layer: Any) -> list[str]:
    if isinstance(layer, ReshapedKernel):
        layer = argparse.Namespace(weight=layer.scale * layer.matrix.weight.unflatten(1, (-1, 3, 3)))
    values = singular_values(layer)
    return [
        f"{(value.item() - 1):.1e}" if math.isfinite(value) else "not finite" for value in (values.min(), values.max())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measures = {"speed": speed, "rule": rule, "exactness": exactness, "inverse": inverse}
    for name in measures:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--channels", type=int, nargs="+", default=CHANNELS)
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--time-limit", type=float, default=4.0, help="seconds for each method; default: %(default)s")
    parser.add_argument("--steps", type=int, default=10_000, help="of --exactness; default: %(default)s")
    parser.add_argument("--out", type=Path, default=FOLDER, help="default: %(default)s")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # of the other libraries
    torch.manual_seed(0)
    for name, function in measures.items():
        if getattr(options, name):
            where = f"{describe()['cpu']}, {torch.get_num_threads()} threads, torch {torch.__version__}"
            note = f"Measured by `python benchmarks/orthogonal_conv.py --{name}` on an {where}."
            _files.write(options.out / f"{name}.md", f"{markdown(function(options))}\n\n{note}\n")


if __name__ == "__main__":
    main()
