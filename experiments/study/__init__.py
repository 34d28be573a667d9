"""The study of learning: do networks that have SVDs learn as well as plain ones, and with which settings?

``make study`` runs it, ``docs/training.md`` says what it shows. A run is one training of one network: ``data`` has what
is learned from, ``networks`` what learns, ``methods`` what its weights are, ``training`` how; ``experiments`` lists the
runs, ``runner`` makes them, and ``tables`` and ``figures`` show them.
"""
