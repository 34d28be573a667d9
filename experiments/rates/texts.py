"""Texts and tables that the choosing tasks do not use: from Python's own library and scikit-learn's."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_breast_cancer, load_sample_image  # type: ignore[import-untyped]
from torch import Tensor

from experiments.harness.data import Text

PACKAGES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "xml")


class Rows(NamedTuple):
    """Inputs and targets, each column with mean 0 and variance 1 over the training rows."""

    inputs: Tensor
    targets: Tensor


class Regression(NamedTuple):
    training: Rows
    test: Rows


@cache
def english() -> Text:
    """The help texts of Python: the last tenth is for the test."""
    text = (Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py").read_bytes()
    codes = _ascii(text.replace(b"\\n", b"\n"))
    return Text(*codes.tensor_split([len(codes) * 9 // 10]))


@cache
def packages() -> Text:
    """The source of some packages of Python's standard library; the study's text has single modules only."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for name in PACKAGES for file in sorted((root / name).rglob("*.py")) if "test" not in file.parts]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, file in enumerate(files):
        parts[i % 10 == 9].append(file.read_bytes())
    training, test = (_ascii(b"\n".join(part)) for part in parts)
    return Text(training, test)


def _ascii(text: bytes) -> Tensor:
    return torch.tensor(list(text.decode("utf-8", "replace").encode("ascii", "replace")))


@cache
def table() -> Regression:
    """Breast cancer, 569 rows: the ten "worst" measures of each image from the twenty others."""
    rows = torch.tensor(load_breast_cancer().data, dtype=torch.float32)
    return _regression(rows[:, :20], rows[:, 20:])


@cache
def photograph() -> Regression:
    """Every seventh pixel of a photograph, 3 numbers, from the 24 around it, 72 numbers."""
    image = torch.tensor(load_sample_image("china.jpg"), dtype=torch.float32).permute(2, 0, 1)
    patches = image.unfold(1, 5, 1).unfold(2, 5, 1).flatten(1, 2).transpose(0, 1).flatten(2)  # (pixels, 3, 25)
    patches = patches[::7]
    around = torch.cat((patches[..., :12], patches[..., 13:]), -1).flatten(1)
    return _regression(around, patches[..., 12])


def _regression(inputs: Tensor, targets: Tensor) -> Regression:
    """Every fifth row is for the test."""
    test = torch.arange(len(inputs)) % 5 == 4

    def scaled(columns: Tensor) -> Tensor:
        return (columns - columns[~test].mean(0)) / columns[~test].std(0)

    inputs, targets = scaled(inputs), scaled(targets)
    return Regression(Rows(inputs[~test], targets[~test]), Rows(inputs[test], targets[test]))
