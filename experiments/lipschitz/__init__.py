"""Classifiers with a Lipschitz constant of 1: which layers certify most images, and at what price?

    networks.py   the network, and the layers that it is made of
    training.py   the data, an attack, and one run
    report.py     tables and the picture
    __main__.py   the command: ``make lipschitz``

docs/convolutions.md shows what it found.
"""
