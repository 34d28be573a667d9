"""The study: do networks that hold their weights as SVDs learn as well as plain ones, and at which rates?

    networks.py   the networks, with plain layers
    tasks.py      a task: network, batches, loss and score
    methods.py    how the weights are held, and the optimizer
    training.py   one run, verified before and after
    grid.py       the lists of runs
    tables.py     the results as tables
    figures.py    the results as figures
    __main__.py   the command: ``make study``

docs/training.md shows what it found.
"""
