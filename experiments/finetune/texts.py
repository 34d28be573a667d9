"""The first text is Python's standard library, the new one licences: both installed, nothing is downloaded."""

from __future__ import annotations

import re
import sysconfig
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Generator, Tensor

from experiments.harness import data
from experiments.harness.data import CHARACTERS, Text

__all__ = ["CHARACTERS", "Text", "batch", "first", "new", "windows"]

SYSTEM = (("/usr/share/common-licenses", "*"), ("/usr/share/doc", "*/copyright"))  # of Debian and its kin
LEAST, MOST = 200, 1_500_000  # characters of a paragraph, and of all


def first() -> Text:
    """The source of Python's standard library."""
    return data.text()


@cache
def new() -> Text:
    """Paragraphs of licences, each once: of the system, or else of the installed Python packages.

    A tenth of the paragraphs, whichever their checksum says, is for the test.
    """
    parts: tuple[dict[str, None], dict[str, None]] = ({}, {})
    total = 0
    for file in (*_of_system(), *_of_packages()):
        text = file.read_bytes().decode("utf-8", "replace").encode("ascii", "replace").decode()
        for paragraph in re.split(r"\n\s*\n", text):
            words = " ".join(paragraph.split())
            part = parts[zlib.crc32(words.encode()) % 10 == 9]
            if len(words) >= LEAST and words not in part:
                part[words] = None
                total += len(words)
        if total > MOST:
            break
    training, test = (torch.tensor(list("\n\n".join(part).encode())) for part in parts)
    return Text(training, test)


def _of_system() -> Iterator[Path]:
    for folder, pattern in SYSTEM:
        yield from sorted({file.resolve() for file in Path(folder).glob(pattern) if file.is_file()})


def _of_packages() -> Iterator[Path]:
    packages = Path(sysconfig.get_path("purelib"))
    for pattern in ("*.dist-info/**/LICEN[CS]E*", "*.dist-info/METADATA"):
        yield from sorted(file for file in packages.glob(pattern) if file.is_file())


def batch(text: Tensor, size: int, length: int, generator: Generator) -> Tensor:
    """Windows at random places: (size, length)."""
    starts = torch.randint(len(text) - length, (size, 1), generator=generator)
    return text[starts + torch.arange(length)]


def windows(text: Tensor, count: int, length: int) -> Tensor:
    """Returns ``count`` evenly spaced, fixed windows of the text: (count, length)."""
    starts = torch.linspace(0, len(text) - length, count).long()
    return text[starts[:, None] + torch.arange(length)]
