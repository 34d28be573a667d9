"""A recurrent net whose hidden-to-hidden weights are held as their singular value decompositions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasth.functional import autocast_enabled
from fasth.nn.factored import one_of
from fasth.nn.recurrence import NONLINEARITIES, Times, last_states, recurrence
from fasth.nn.recurrent import Recurrent
from fasth.reflections.plan import CORE
from fasth.reflections.planner import backend_for
from fasth.spectrum import Spectrum, around, free

EPS = 0.01


class RNNSVD(Recurrent, converts=nn.RNN):
    """h_t = f(W_ih x_t + b_ih + W_hh h_{t−1} + b_hh) with W_hh = U diag(σ) Vᵀ held, and trained, as its SVD.

    ``nn.RNN``'s signature, shapes and parameters, except that each ``weight_hh_l{k}[_reverse]``: (hidden, hidden) is
    made of the parameters ``reflectors_l{k}[_reverse]``: (hidden, hidden) and ``sigma_l{k}[_reverse]``: (hidden,), as
    ``LinearSVD`` says. It can be read as an attribute; to change it there is ``set_weight_``.

    ∂h_T/∂h_t is a product of T − t of these matrices (and slopes of f), so it explodes or vanishes with σ^(T − t). The
    spectrum keeps σ within 1 ± eps, exactly and at every step of training.

    Args:
        input_size, …, dtype: those of ``nn.RNN``, but for the default of ``nonlinearity``.
        nonlinearity: "modrelu": f(z) = sign(z) · relu(|z| + b), with a bias b of its own, ``bias_modrelu_l{k}
            [_reverse]``: (hidden,), which starts at 0. Its slope is 0 or 1, and at the start 1, so it neither shrinks
            states nor their gradients. "tanh" and "relu": those of ``nn.RNN``, which remember less.
        spectrum: the map from the parameters ``sigma`` to σ, of ``fasth.spectrum``; by default ``around(1, eps)``.
        eps: how far σ may be from 1; for the default spectrum only. With 0 the weights are orthogonal: there are no
            parameters ``sigma``, and forming W_hh = H₁⋯H_h diag(signs) takes a third of the work.
        init: the orthogonal matrix that each W_hh starts as. "henaff": rotations of pairs of units by angles uniform in
            [−π, π]. "cayley": by angles −tan(t/2) with t uniform in [0, π/2]. "haar": uniformly distributed.
            "identity". σ is 1, or what the spectrum has nearest to it. All else is drawn as in ``nn.RNN``.

    The weights are formed once per call, each at the cost of about 2·hidden time steps of a single sequence, and within
    ``fasth.cached()`` once. On a CPU, in float32 and float64, the compiled core then runs through all times, in about
    half the time of ``nn.RNN``. Elsewhere tanh and relu take torch's kernels, and modReLU a loop over time, or, on a
    GPU with up to 256 hidden units, a kernel for all times.
    ``docs/recurrent.md`` says what to choose.

    Example:
        >>> rnn = RNNSVD(10, 128)
        >>> output, h = rnn(torch.randn(100, 32, 10))
        >>> output.shape, h.shape
        (torch.Size([100, 32, 128]), torch.Size([1, 32, 128]))
    """

    _twin = nn.RNN
    _gates = 1
    _defaults = {  # noqa: RUF012
        "num_layers": 1,
        "nonlinearity": "modrelu",
        "bias": True,
        "batch_first": False,
        "dropout": 0.0,
        "bidirectional": False,
    }

    nonlinearity: str

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "modrelu",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spectrum: Spectrum | None = None,
        eps: float = EPS,
        init: str = "henaff",
    ) -> None:
        super().__init__()
        one_of("nonlinearity", nonlinearity, NONLINEARITIES)
        options = (num_layers, "tanh", bias, batch_first, dropout, bidirectional)
        dense = nn.RNN(input_size, hidden_size, *options, device="meta")
        if eps < 0:
            raise ValueError(f"`eps` should be at least 0; got {eps}")
        if spectrum is None and eps > 0:
            spectrum = around(1, eps)
        self._add_parameters(dense, spectrum, init, device, dtype)
        self.nonlinearity = nonlinearity
        for where in self._places() if nonlinearity == "modrelu" else ():
            bias_modrelu = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
            self.register_parameter(f"bias_modrelu_{where}", bias_modrelu)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The hidden-to-hidden weights as ``init`` says, modReLU's biases zero, everything else as in ``nn.RNN``."""
        super().reset_parameters()
        for name, parameter in self.named_parameters():
            if name.startswith("bias_modrelu"):
                nn.init.zeros_(parameter)

    def _run(self, input: Tensor, states: list[Tensor], batch_sizes: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        (hx,) = states
        if self.nonlinearity != "modrelu" and not self._on_core(input, hx):
            kernel = torch.rnn_tanh if self.nonlinearity == "tanh" else torch.rnn_relu
            return self._by_kernel(kernel, input, hx, batch_sizes)
        sizes = None if batch_sizes is None else batch_sizes.tolist()
        x = input.transpose(0, 1) if self.batch_first and sizes is None else input
        if len(x) == 0:
            raise ValueError(f"`input` should have at least one time step; got shape {tuple(input.shape)}")
        weights, hidden = iter(zip(self._places(), self._weights(), hx, strict=True)), []
        directions = 1 + self.bidirectional
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            outputs = []
            for direction in range(directions):
                times = Times(sizes, reverse=bool(direction))
                outputs.append(self._layer(x, *next(weights), times))
                hidden.append(last_states(outputs[-1], times))
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        x = self._for_caller(x) if directions == 1 else x
        return x.transpose(0, 1) if self.batch_first and sizes is None else x, [torch.stack(hidden)]

    def _why_not_to_dense(self) -> str:
        return "nn.RNN has no modReLU" if self.nonlinearity == "modrelu" else ""

    @property
    def _rates(self) -> tuple[float, float]:
        """Below 1 for a spectrum close to 1, made for long memory: a change of W acts at every time step."""
        if self.spectrum is None:
            return 1.0, 0.05
        return (0.01, 0.025) if self.spectrum.bounded else (1.0, 1.0)  # 0.025: both U and V turn

    def _on_core(self, input: Tensor, hx: Tensor) -> bool:
        return not autocast_enabled(input) and backend_for(input, hx, self.weight_ih_l0) == CORE

    def _layer(self, x: Tensor, where: str, weights: list[Tensor], h0: Tensor, times: Times) -> Tensor:
        W_ih, W_hh, *biases = weights
        inputs = F.linear(x, W_ih, sum(biases[1:], biases[0]) if biases else None)
        return recurrence(inputs, W_hh, h0, getattr(self, f"bias_modrelu_{where}", None), self.nonlinearity, times)

    @classmethod
    def from_rnn(cls, rnn: nn.RNN, *, spectrum: Spectrum | None = None) -> RNNSVD:
        """The layer with the weights, biases, dtype, device and mode of an ``nn.RNN``. They share no memory.

        Unlike in the constructor the default spectrum is ``free()``, with which the output is the same to rounding.
        Other spectra replace singular values outside their range by the nearest inside. Costs one SVD of each hidden-
        to-hidden weight, O(hidden³). Draws no random numbers.
        """
        return cls._from_dense(rnn, spectrum=free() if spectrum is None else spectrum)

    def to_rnn(self) -> nn.RNN:
        """An ``nn.RNN`` with this layer's weights, biases, dtype, device and mode. They share no memory."""
        if self.nonlinearity == "modrelu":
            raise ValueError("`nonlinearity` should be one that nn.RNN has, 'tanh' or 'relu'; got 'modrelu'")
        return self._to_dense()
