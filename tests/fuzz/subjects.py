"""The table of subjects, and how one case is run."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable
from typing import NamedTuple

from fasth.reflections import core
from fuzz import reference
from fuzz.adapted import adapter_case
from fuzz.compiled import compiled_case
from fuzz.draws import Draw
from fuzz.flows import layer_flow_case, reflector_flow_case
from fuzz.functions import householder_case
from fuzz.layers import conv_case, linear_case
from fuzz.maps import map_case
from fuzz.operators import orthogonal_case, svd_case
from fuzz.outcome import Outcome
from fuzz.parametrized import converted_case, parametrized_case
from fuzz.recurrent import recurrent_case


class Subject(NamedTuple):
    weight: int  # how many of all cases are of this one, in proportion
    run: Callable[[Draw], None]


SUBJECTS = {
    "householder": Subject(7000, householder_case),
    "Orthogonal": Subject(1800, orthogonal_case),
    "SVD, Symmetric": Subject(2600, svd_case),
    "linear layers": Subject(4400, linear_case),
    "convolutions": Subject(900, conv_case),
    "maps of images": Subject(600, map_case),
    "recurrent layers": Subject(700, recurrent_case),
    "parametrizations": Subject(800, parametrized_case),
    "converted layers": Subject(800, converted_case),
    "adapters": Subject(700, adapter_case),
    "flows of layers": Subject(500, layer_flow_case),
    "flows of reflectors": Subject(900, reflector_flow_case),
    "torch.compile": Subject(3, compiled_case),
}


CORES = {"default": core.core(), "pytorch": None} | {level: core.load(level) for level in core.available_levels()}


def prepare() -> None:
    """Sets up a process for cases."""
    logging.getLogger("fasth").setLevel(logging.ERROR)  # what a conversion leaves alone is expected here
    reference.replace_the_definition()


def run_case(seed: int, case: int) -> Outcome:
    """The case of this number. What it draws depends on nothing else."""
    draw = Draw(seed, case)
    name = draw.weighted({name: subject.weight for name, subject in SUBJECTS.items()})
    draw.threads()
    draw.backend(CORES)
    failure = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SUBJECTS[name].run(draw)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        failure = f"{type(error).__name__} in {where.name}: {error}"  # never empty, as some messages are
    return Outcome(name, draw.first_dtype, draw.notes, draw.actions, failure)
