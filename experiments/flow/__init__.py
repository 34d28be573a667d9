"""Normalizing flows whose channels are mixed by one linear map or another: which learns best, and at what price?

    models.py     the flow, and the linear maps that mix its channels
    training.py   the data, and one run
    report.py     tables and pictures
    __main__.py   the command: ``make flow``

docs/flows.md shows what it found.
"""
