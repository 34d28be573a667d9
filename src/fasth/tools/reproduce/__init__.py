"""The paper's experiments: its algorithms and today's alternatives, verified and timed in one way.

Nothing in the library imports this package. The order of its files:

    baselines.py   the algorithms that the paper compares, each a function of x and V
    printed.py     FastH once more, as the paper prints it
    methods.py     every method in one form: the baselines, fasth's own, the other libraries
    operations.py  the four matrix operations of the paper's Table 1, as methods
    layers.py      layers of this library and of torch.nn, as methods
    timing.py      the one place that verifies and times a method
    memory.py      the peak memory of a step
    counts.py      the launches, operations and bytes of a step on a GPU, counted on the meta device
    tasks.py       the tasks of an experiment, and their records
    experiments.py the paper's experiments and ours, as data
    runner.py      runs the experiments, stores each task's records, and resumes an interrupted run
    tables.py      records as tables
    figures.py     records as figures
    report.py      the HTML page with tables and figures
    options.py     the options of ``fasth reproduce``
    command.py     ``fasth reproduce``
"""
