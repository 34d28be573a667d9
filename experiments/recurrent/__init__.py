"""Recurrent nets: which of them learn to remember, to add and to see, in how many steps and in what time?

    models.py     the nets that are compared
    tasks.py      copy memory, the adding problem, images pixel by pixel
    training.py   one run
    report.py     tables and pictures
    __main__.py   the command: ``make recurrent``

docs/recurrent.md shows what it found.
"""
