"""A small language model that knows one text is fine-tuned on another: which adapter learns it best, and forgets what?

    texts.py      the two texts, from files that are installed
    methods.py    the adapters, of about as many parameters each
    training.py   one run: the first training, or a fine-tuning
    report.py     a table and a picture
    __main__.py   the command: ``make finetune``

docs/adapters.md shows what it found.
"""
