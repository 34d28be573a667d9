"""The GPU kernels. Only ``launch`` and ``kernels`` import Triton, and are imported when a kernel is first needed."""
