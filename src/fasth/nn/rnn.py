"""A recurrent net whose hidden-to-hidden weights are held as their singular value decompositions."""

from __future__ import annotations

import math
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fasth import spectrum as spectra
from fasth.functional import autocast_enabled, check_tensor
from fasth.nn.factored import Factored, Factors, check_dtype, one_of
from fasth.nn.factors import INITS, check_signs, put_signs
from fasth.nn.linear import LinearSVD
from fasth.operators import SVD

FACTORS = ("reflectors", "sigma")
OPTIONS = {
    "num_layers": 1,
    "nonlinearity": "tanh",
    "bias": True,
    "batch_first": False,
    "dropout": 0.0,
    "bidirectional": False,
}


class RNNSVD(Factored):
    """h_t = tanh(W_ih x_t + b_ih + W_hh h_{t−1} + b_hh) with W_hh = U diag(σ) Vᵀ held, and trained, as its SVD.

    ``nn.RNN``'s signature, shapes and parameters, except that each ``weight_hh_l{k}[_reverse]``: (hidden, hidden) is
    made of the parameters ``reflectors_l{k}[_reverse]``: (hidden, hidden) and ``sigma_l{k}[_reverse]``: (hidden,), as
    ``LinearSVD`` says. It can be read as an attribute.

    What h_T owes to h_t is a product of T − t of these matrices (and slopes of tanh), so it explodes or vanishes with
    σ^(T − t). The spectrum keeps σ within 1 ± eps, exactly and at every step of training.

    Args:
        input_size, …, dtype: those of ``nn.RNN``.
        spectrum: the map from the parameters ``sigma`` to σ, of ``fasth.spectrum``; by default ``around(1, eps)``.
        eps: how far σ may be from 1; for the default spectrum only.
        init: "haar": each W_hh is a uniformly distributed orthogonal matrix. "identity": W_hh = I. In both σ is 1, or
            what the spectrum has nearest to it. All else is drawn as in ``nn.RNN``.

    The weights are formed once per call, each at the cost of about 2·hidden time steps of a single sequence, and handed
    to the kernel that ``nn.RNN`` uses; within ``fasth.cached()`` they are formed once.
    """

    input_size: int
    hidden_size: int
    num_layers: int
    nonlinearity: str
    bias: bool  # type: ignore[assignment]
    batch_first: bool
    dropout: float
    bidirectional: bool

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spectrum: spectra.Spectrum | None = None,
        eps: float = 0.1,
        init: str = "haar",
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        # nn.RNN checks the arguments, and knows the names and shapes of its parameters.
        options = (num_layers, nonlinearity, bias, batch_first, dropout, bidirectional)
        dense = nn.RNN(input_size, hidden_size, *options, device="meta")
        for name, value in _arguments(dense).items():
            setattr(self, name, value)
        self.spectrum = spectra.around(1, eps) if spectrum is None else spectrum
        self.init = one_of("init", init, INITS)
        for name, parameter in dense.named_parameters():
            if name.startswith("weight_hh"):
                self._add_factors(name.removeprefix("weight_hh_"), device, dtype)
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, device=device, dtype=dtype)))
        self._factor_names = tuple(f"{factor}_{where}" for where in self._places() for factor in FACTORS)
        self.reset_parameters()

    def _places(self) -> list[str]:
        """The layers and directions, as the names of parameters end."""
        directions = ("", "_reverse") if self.bidirectional else ("",)
        return [f"l{layer}{direction}" for layer in range(self.num_layers) for direction in directions]

    def _add_factors(self, where: str, device: Any, dtype: torch.dtype | None) -> None:
        h = self.hidden_size
        for name, shape in (("reflectors", (h, h)), ("sigma", (h,))):
            self.register_parameter(f"{name}_{where}", nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    def reset_parameters(self) -> None:
        """The hidden-to-hidden weights as ``init`` says, everything else as in ``nn.RNN``."""
        if self.weight_ih_l0.is_meta:
            return
        for name, parameter in self.named_parameters():
            if name.startswith(("weight_ih", "bias")):
                nn.init.uniform_(parameter, -1 / math.sqrt(self.hidden_size), 1 / math.sqrt(self.hidden_size))
        h = self.hidden_size
        for where in self._places():
            square = LinearSVD(h, h, False, **_like(self), spectrum=self.spectrum, init=self.init)
            self._copy_factors(square.requires_grad_(getattr(self, f"sigma_{where}").requires_grad), where)

    def _copy_factors(self, square: LinearSVD, where: str) -> None:
        for name in FACTORS:
            self._write(**{f"{name}_{where}": getattr(square, name)})
            getattr(self, f"{name}_{where}").requires_grad_(getattr(square, name).requires_grad)

    def _svd(self, where: str) -> SVD:
        reflectors, sigma = (getattr(self, f"{name}_{where}") for name in FACTORS)
        return SVD.of_shared(reflectors, self.spectrum(sigma))

    @property
    def svds(self) -> dict[str, SVD]:
        """The SVD of each hidden-to-hidden weight, by the name that it has in ``nn.RNN``; differentiable."""
        return {f"weight_hh_{where}": self._svd(where) for where in self._places()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("weight_hh_") and (where := name.removeprefix("weight_hh_")) in self._places():
            cached = self._cached_weight()
            return self._svd(where).dense() if cached is None else cached[self._places().index(where)]
        return super().__getattr__(name)

    @property
    def weight(self) -> Tensor:
        """All hidden-to-hidden weights: (num_layers·directions, hidden, hidden), in the order of the hidden states."""
        return torch.stack(self._hidden_weights())

    def _form(self) -> list[Tensor]:
        # Contiguous, since every time step multiplies by them, and its gradient adds to theirs.
        return [self._svd(where).dense().contiguous() for where in self._places()]

    def _hidden_weights(self) -> list[Tensor]:
        cached = self._cached_weight()
        return self._form() if cached is None else cached

    def _weights(self) -> list[Tensor]:
        """As the kernel takes them: for each layer and direction W_ih, W_hh and, if any, b_ih and b_hh."""
        weights = []
        for where, W_hh in zip(self._places(), self._hidden_weights(), strict=True):
            biases = [getattr(self, f"{name}_{where}") for name in ("bias_ih", "bias_hh")] if self.bias else []
            weights += [getattr(self, f"weight_ih_{where}"), W_hh, *biases]
        return weights

    @overload
    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, input: PackedSequence, hx: Tensor | None = None) -> tuple[PackedSequence, Tensor]: ...

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """The hidden states of the last layer at all times, and those of all layers after the last time.

        Args:
            input: (time, batch, input_size), (batch, time, input_size) if ``batch_first``, (time, input_size), or a
                packed sequence.
            hx: (num_layers·directions, batch, hidden_size), without the batch if ``input`` has none. Zeros by default.
        """
        kernel = torch.rnn_tanh if self.nonlinearity == "tanh" else torch.rnn_relu
        options = (self.bias, self.num_layers, self.dropout, self.training, self.bidirectional)
        if isinstance(input, PackedSequence):
            data, batch_sizes, order, order_back = input
            hx = self._initial(data, int(batch_sizes[0]), hx)
            hx = hx if order is None else hx.index_select(1, order)
            output, hidden = kernel(data, batch_sizes, hx, self._weights(), *options)
            hidden = hidden if order_back is None else hidden.index_select(1, order_back)
            return PackedSequence(output, batch_sizes, order, order_back), hidden
        check_tensor("input", input)
        if input.ndim not in (2, 3):
            raise ValueError(f"`input` should have two or three dimensions; got shape {tuple(input.shape)}")
        if hx is not None and hx.ndim != input.ndim:
            raise ValueError(
                f"`hx` should have as many dimensions as `input`, of shape {tuple(input.shape)}; got {tuple(hx.shape)}"
            )
        batch_dim = 0 if self.batch_first else 1
        if input.ndim == 2:
            output, hidden = self.forward(input.unsqueeze(batch_dim), None if hx is None else hx.unsqueeze(1))
            return output.squeeze(batch_dim), hidden.squeeze(1)
        hx = self._initial(input, input.shape[batch_dim], hx)
        return kernel(input, hx, self._weights(), *options, self.batch_first)

    def _initial(self, input: Tensor, batch: int, hx: Tensor | None) -> Tensor:
        """``hx``, or zeros, after a check of both."""
        if input.shape[-1] != self.input_size:
            raise ValueError(f"`input` should have last dimension {self.input_size}; got shape {tuple(input.shape)}")
        dtype = self.weight_ih_l0.dtype
        if input.dtype != dtype and not autocast_enabled(input):
            raise ValueError(f"`input` should have the layer's dtype, {dtype}; got {input.dtype}")
        shape = (len(self._places()), batch, self.hidden_size)
        if hx is None:
            return input.new_zeros(shape)
        if hx.shape != shape:
            raise ValueError(
                f"`hx` should have shape {shape}, or {shape[::2]} for unbatched input; got {tuple(hx.shape)}"
            )
        return hx

    def _dense_names(self) -> dict[str, tuple[str, ...]]:
        return {f"weight_hh_{where}": tuple(f"{name}_{where}" for name in FACTORS) for where in self._places()}

    def _decompose_named(self, name: str, weight: Tensor) -> Factors:
        where, like = name.removeprefix("weight_hh_"), {"device": weight.device, "dtype": weight.dtype}
        h = self.hidden_size
        square = nn.utils.skip_init(LinearSVD, h, h, False, **like, spectrum=self.spectrum)
        found = square._decompose(weight)
        return Factors({f"{factor}_{where}": t for factor, t in found.tensors.items()}, found.change)

    def _move_old_signs(self, state_dict: dict[str, Any], prefix: str) -> None:
        for where in self._places():
            signs = state_dict.pop(f"{prefix}signs_{where}", None)
            if signs is not None:
                check_signs(f"{prefix}signs_{where}", signs)
                put_signs(state_dict, f"{prefix}reflectors_{where}", signs.prod(0))

    def flatten_parameters(self) -> None:
        """Nothing to do: it is here because code that is written for ``nn.RNN`` calls it."""

    @classmethod
    def from_rnn(cls, rnn: nn.RNN, *, spectrum: spectra.Spectrum | None = None) -> RNNSVD:
        """The layer with the weights, biases, dtype, device and mode of an ``nn.RNN``. They share no memory.

        Unlike in the constructor the default spectrum is ``free()``, with which it computes the same to rounding. Any
        other replaces singular values that it does not have by the nearest ones that it has. One SVD of each hidden-to-
        hidden weight: O(hidden³). Draws no random numbers.
        """
        if not isinstance(rnn, nn.RNN):
            raise TypeError(f"`rnn` should be an nn.RNN; got {type(rnn).__name__}")
        h, spectrum = rnn.hidden_size, spectra.free() if spectrum is None else spectrum
        layer: RNNSVD = nn.utils.skip_init(cls, **_arguments(rnn), **_like(rnn), spectrum=spectrum)
        square = nn.utils.skip_init(LinearSVD, h, h, False, **_like(rnn), spectrum=spectrum)
        for name, parameter in rnn.named_parameters(remove_duplicate=False):
            if name.startswith("weight_hh_"):
                square.set_weight_(parameter).requires_grad_(parameter.requires_grad)
                layer._copy_factors(square, name.removeprefix("weight_hh_"))
            else:
                _copy(parameter, getattr(layer, name))
        return layer.train(rnn.training)

    def to_rnn(self) -> nn.RNN:
        """An ``nn.RNN`` with this layer's weights, biases, dtype, device and mode. They share no memory."""
        like = _like(self)
        rnn = nn.RNN(**_arguments(self), device="meta", dtype=like["dtype"]).to_empty(device=like["device"])
        with torch.enable_grad():  # a weight is to be trained if one of its factors is
            for name, parameter in rnn.named_parameters():
                _copy(getattr(self, name), parameter)
        return rnn.train(self.training)

    def extra_repr(self) -> str:
        options = [f"{name}={value!r}" for name in OPTIONS if (value := getattr(self, name)) != OPTIONS[name]]
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *options, f"spectrum={self.spectrum}"])


def _arguments(rnn: nn.RNN | RNNSVD) -> dict[str, Any]:
    return {name: getattr(rnn, name) for name in ("input_size", "hidden_size", *OPTIONS)}


def _like(rnn: nn.RNN | RNNSVD) -> dict[str, Any]:
    return {"device": rnn.weight_ih_l0.device, "dtype": rnn.weight_ih_l0.dtype}


@torch.no_grad()
def _copy(source: Tensor, target: Tensor) -> None:
    """The values, and whether they are to be trained."""
    target.copy_(source)
    target.requires_grad_(source.requires_grad)
