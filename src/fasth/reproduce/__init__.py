"""The paper's experiments: its algorithms and today's alternatives, verified and timed in one way.

Nothing in the library imports this package. The order of its files:

    baselines.py   the algorithms that the paper compares, each a function of x and V
    methods.py     every method in one form: the baselines, fasth's own, the other libraries
    timing.py      the one place that verifies and times a method
    results.py     files, written whole or not at all
"""
