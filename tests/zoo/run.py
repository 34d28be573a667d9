"""Runs the checks on the architectures, and prints which of them hold."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import torch

from zoo.checks import CHECKS, Skip, Specimen, described
from zoo.libraries import define_operators_of_torchvision, missing
from zoo.models import ARCHITECTURES, Architecture

HOLDS, FAILS, SKIPPED = "holds", "fails", "skipped"


Results = dict[str, tuple[str, str]]  # of each check whether it holds, and why it does not


def set_up() -> None:
    """Sets one thread in each process, as there are as many processes as cores."""
    torch.set_num_threads(1)
    define_operators_of_torchvision()
    warnings.simplefilter("ignore")  # of the libraries
    logging.getLogger("fasth").setLevel(logging.ERROR)


def timed(index: int, names: list[str]) -> tuple[Results, float]:
    begin = time.monotonic()
    return results_of(ARCHITECTURES[index], names), time.monotonic() - begin


def results_of(architecture: Architecture, names: list[str]) -> Results:
    try:
        specimen = Specimen(architecture)
    except Exception as error:
        return dict.fromkeys(names, (FAILS, f"not made: {described(error)}"))
    results = {}
    for name in names:
        try:
            CHECKS[name](specimen)
            results[name] = HOLDS, ""
        except Skip as error:
            results[name] = SKIPPED, f"the plain model cannot: {described(error)}"
        except Exception as error:
            results[name] = FAILS, described(error)
    return results


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make zoo", description=__doc__)
    parser.add_argument("--only", default="", help="architectures with this in their name, such as timm/ or bert")
    parser.add_argument("--check", nargs="+", default=[*CHECKS], choices=[*CHECKS], help="these checks only")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes, by default one a core")
    options = parser.parse_args(words)
    lacking = missing()
    if lacking:
        parser.error(f"{', '.join(lacking)} should be installed; `make zoo` does that")
    chosen = [i for i, architecture in enumerate(ARCHITECTURES) if options.only in str(architecture)]
    found: dict[str, Results] = {}
    processes = ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn"), set_up)
    with processes:
        running = {i: processes.submit(timed, i, options.check) for i in chosen}
        for i, future in running.items():
            name = str(ARCHITECTURES[i])
            found[name], seconds = future.result()
            counts = Counter(result for result, _ in found[name].values())
            print(f"{name:42} {counts[HOLDS]:2} of {len(options.check)} hold {seconds:6.1f} s", flush=True)
    print("\n" + summary(found, options.check))
    return any(result == FAILS for results in found.values() for result, _ in results.values())


def summary(found: dict[str, Results], checks: list[str]) -> str:
    """A row for each check, what does not hold, and the sum."""
    lines = [f"{'check':18} holds fails skipped"]
    total: Counter[str] = Counter()
    for check in checks:
        counts = Counter(results[check][0] for results in found.values())
        total += counts
        lines.append(f"{check:18} {counts[HOLDS]:5} {counts[FAILS]:5} {counts[SKIPPED]:7}")
    for name, results in found.items():
        lines += [f"{name}, {check}: {result}: {why}" for check, (result, why) in results.items() if result != HOLDS]
    lines.append(
        f"{total[HOLDS]} of {len(found)} × {len(checks)} = {len(found) * len(checks)} hold, "
        f"{total[FAILS]} do not, and {total[SKIPPED]} the plain model cannot do; torch {torch.__version__}"
    )
    return "\n".join(lines)
