"""Code that all experiments share.

README.md beside this folder says how an experiment uses it. Its files:

    results.py   the results file: one record for each finished run
    pool.py      worker processes and the progress bar
    command.py   the command: options, training of missing runs, report
    tables.py    scores over seeds, step times, tables
    figures.py   panels, learning curves, legends
    data.py      images, text and a table, from files that are installed
"""

from experiments.harness.command import Experiment, Options, main, with_options
from experiments.harness.results import (
    Record,
    Results,
    Run,
    best_of_first_seed,
    finite,
    means,
    other_seeds,
)
from fasth.tools.reproduce.timing import WrongAnswer

__all__ = [
    "Experiment",
    "Options",
    "Record",
    "Results",
    "Run",
    "WrongAnswer",
    "best_of_first_seed",
    "finite",
    "main",
    "means",
    "other_seeds",
    "with_options",
]
