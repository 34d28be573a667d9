"""Random cases for every function, operator, layer and flow of fasth, compared with dense float64: ``make fuzz``.

A *case* is one subject of ``subjects.SUBJECTS`` with shapes, strides, dtype, scale, options and thread count drawn from
the seed and the number of the case alone. A case of a function, an operator or a flow is one to three calls, each
compared in value; products and functions of matrices also in the gradients of all arguments that want one. A case of a
layer is a sequence of one to four calls with a change before each but the first: an optimizer's step, a write into
``.data``, a loaded checkpoint, a copy, another dtype … Each time the output, and in training the gradients of the input
and of every parameter, are compared with the twin of its *current* parameters, so that an answer from old ones is
noticed.

The twins compute in float64, one reflection at a time. Tolerances follow from the size of the problem, the dtype and
the sizes of the numbers: see ``compare``.

    draws.py       random numbers, shapes, strides and dtypes
    compare.py     the comparison, and what rounding may do
    reference.py   the definition in float64 with its gradient, in NumPy for speed
    functions.py   operators.py   layers.py   maps.py   recurrent.py   parametrized.py   adapted.py   flows.py
                   the subjects, and compiled.py
    changes.py     every way to change a layer
    subjects.py    the table of subjects; runs one case
    workers.py     processes that run cases
    state.py       what has been run, and its summary
    run.py         time, progress, resuming; the command line

To add a subject, write a function that takes a ``Draw``, compares, and raises an AssertionError where something is
wrong, and put it into ``subjects.SUBJECTS``.
"""
