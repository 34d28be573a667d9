"""The base class of recurrent nets whose hidden-to-hidden weights are held as their singular value decompositions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fasth.functional import autocast_enabled, check_tensor, svd_dense
from fasth.nn.computed import computed
from fasth.nn.factored import Factored, Factors, check_dtype, one_of
from fasth.nn.factors import INITS, one_side, spectrum_or_free
from fasth.nn.held_weight import HeldWeight
from fasth.nn.init import rotations
from fasth.nn.linear import LinearOrthogonal, LinearSVD
from fasth.operators import SVD, Orthogonal
from fasth.operators.orthogonal import compact_from_dense
from fasth.spectrum import Spectrum

Self = TypeVar("Self", bound="Recurrent")

RECURRENT_INITS = (*INITS, "henaff", "cayley")
BIASES = ("bias_ih", "bias_hh")


class Recurrent(Factored):
    """A net with the parameters of ``_twin``, a class of ``torch.nn``, except the hidden-to-hidden weights.

    In each ``weight_hh_l{k}[_reverse]``: (gates·n, m), the matrix of every gate is W = U diag(σ) Vᵀ. The parameters
    ``reflectors_l{k}[_reverse]``: (gates·n, m) and ``sigma_l{k}[_reverse]``: (gates·min(n, m),) replace it, with the
    gates one below the other, each in the form of ``LinearSVD``. Without a spectrum W is orthogonal, there is no sigma,
    and the reflectors are in the form of ``LinearOrthogonal``.
    """

    _twin: type[nn.RNNBase]
    _gates: int
    _defaults: dict[str, Any]  # defaults of the twin's options besides its sizes

    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool  # type: ignore[assignment]
    batch_first: bool
    dropout: float
    bidirectional: bool
    spectrum: Spectrum | None  # None: the weights are orthogonal

    def _add_parameters(
        self, dense: nn.RNNBase, spectrum: Spectrum | None, init: str, device: Any, dtype: torch.dtype | None
    ) -> None:
        """Adds the parameters of ``dense``, which checks the options and has their names and shapes."""
        check_dtype(dtype)
        for name in ("input_size", "hidden_size", *self._defaults):
            setattr(self, name, getattr(dense, name))
        self.spectrum = None if spectrum is None else spectrum_or_free(spectrum)
        self.init = one_of("init", init, RECURRENT_INITS)
        self._factors_of_one = ("reflectors",) if spectrum is None else ("reflectors", "sigma")
        n, m = self._matrix_shape
        if self.init in ("henaff", "cayley") and n != m:
            raise ValueError(f"`init` should be 'haar' or 'identity' for weights of {n}×{m}; got {init!r}")
        shapes = {"reflectors": (self._gates * n, m), "sigma": (self._gates * min(n, m),)}
        for name, parameter in dense.named_parameters():
            if name.startswith("weight_hh"):
                names = {f"{factor}_{self._place(name)}": shapes[factor] for factor in self._factors_of_one}
            else:
                names = {name: tuple(parameter.shape)}
            for new_name, shape in names.items():
                self.register_parameter(new_name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self._factor_names = tuple(f"{factor}_{where}" for where in self._places() for factor in self._factors_of_one)

    @property
    def _matrix_shape(self) -> tuple[int, int]:
        """Shape (n, m) of one gate's matrix."""
        return self.hidden_size, getattr(self, "proj_size", 0) or self.hidden_size

    @staticmethod
    def _place(name: str) -> str:
        """The suffix of parameter names that names the layer and the direction of a hidden-to-hidden weight."""
        return name.removeprefix("weight_hh_")

    def _places(self) -> list[str]:
        directions = ("", "_reverse") if self.bidirectional else ("",)
        return [f"l{layer}{direction}" for layer in range(self.num_layers) for direction in directions]

    def reset_parameters(self) -> None:
        """Initializes the hidden-to-hidden weights by ``init``, and all other parameters as in ``torch.nn``."""
        if self.weight_ih_l0.is_meta:
            return
        bound = 1 / math.sqrt(self.hidden_size)
        for name, parameter in self.named_parameters():
            if name.startswith(("weight", "bias")):
                nn.init.uniform_(parameter, -bound, bound)
        for where in self._places():
            gates = [self._new_gate(self.init, **_like(self)) for _ in range(self._gates)]
            self._write(**self._stacked([{n: getattr(gate, n) for n in self._factors_of_one} for gate in gates], where))

    def _new_gate(self, init: str, **like: Any) -> LinearSVD | LinearOrthogonal:
        """Makes a layer with a matrix of one gate's shape."""
        n, m = self._matrix_shape
        options = like | {"init": init if init in INITS else "identity"}
        gate: Any
        if self.spectrum is None:
            gate = LinearOrthogonal(m, n, False, **options)
        else:
            gate = LinearSVD(m, n, False, **options, spectrum=self.spectrum)
        if init not in INITS and not gate._first().is_meta:
            Q = compact_from_dense(rotations(n, init, **like))
            if self.spectrum is None:
                gate._write(**gate._as_parameters(Q))
            else:  # U is the rotation, and V the identity
                sigma = Q.new_ones(n)
                start = {"sigma": self.spectrum.start(sigma)}
                gate._write(**gate._as_parameters(Q, sigma, -torch.eye(n, **like)) | start)
        return gate

    def _stacked(self, gates: list[dict[str, Tensor]], where: str) -> dict[str, Tensor]:
        """Stacks the factors of the gates to the parameters of one layer and direction."""
        return {f"{name}_{where}": torch.cat([gate[name].detach() for gate in gates]) for name in self._factors_of_one}

    def _gate_factors(self, where: str) -> list[tuple[Tensor, Tensor | None]]:
        """The reflectors and σ of each gate."""
        reflectors = getattr(self, f"reflectors_{where}").chunk(self._gates)
        sigma = [None] if self.spectrum is None else self._sigma(where).view(self._gates, -1)
        return list(zip(reflectors, sigma, strict=True))

    def _sigma(self, where: str) -> Tensor:
        """σ: (k,), or (gates, k)."""
        reflectors = getattr(self, f"reflectors_{where}")
        if self.spectrum is None:
            return reflectors.new_ones(len(reflectors))
        sigma = getattr(self, f"sigma_{where}")
        return self.spectrum(sigma if self._gates == 1 else sigma.view(self._gates, -1))

    def _svd(self, where: str) -> SVD:
        reflectors, sigma = getattr(self, f"reflectors_{where}"), self._sigma(where)
        if self.spectrum is not None:
            matrices = reflectors if self._gates == 1 else reflectors.unflatten(0, (self._gates, -1))
            return SVD.of_shared(matrices, sigma)
        return SVD(Orthogonal.of_stored(reflectors), sigma, reflectors.new_empty(0, len(reflectors)))

    @property
    def svds(self) -> dict[str, SVD]:
        """Maps the name in ``torch.nn`` of each hidden-to-hidden weight to its SVD, differentiable.

        In a net with gates it is a batch with one matrix for each gate, in their order in ``torch.nn``.
        """
        return {f"weight_hh_{where}": self._svd(where) for where in self._places()}

    def held_weights(self) -> Iterator[HeldWeight]:
        """Yields the hidden-to-hidden weights with their names in ``torch.nn``, as batches if there are gates."""
        shape = self._matrix_shape if self._gates == 1 else (self._gates, *self._matrix_shape)
        for where in self._places():
            sigma = None if self.spectrum is None else getattr(self, f"sigma_{where}")
            factors = getattr(self, f"reflectors_{where}"), sigma, None
            yield HeldWeight(f"weight_hh_{where}", shape, *factors, "compact", self.spectrum, rates=self._rates)

    @property
    def _rates(self) -> tuple[float, float]:
        """Multiples of the learning rates of sigma and of reflectors."""
        return 1.0, 1.0

    def _dense(self, where: str) -> Tensor:
        """weight_hh: (gates·n, m), contiguous, since every time step multiplies by it and adds to its gradient."""
        matrices = []
        for reflectors, sigma in self._gate_factors(where):
            factors = (reflectors, sigma) if self.spectrum is not None else one_side(reflectors, None, False)
            matrices.append(svd_dense(*factors))
        return matrices[0].contiguous() if len(matrices) == 1 else torch.cat(matrices)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("weight_hh_") and (where := self._place(name)) in self._places():
            cached = self._cached_weight()
            return computed(self._dense(where) if cached is None else cached[self._places().index(where)])
        return super().__getattr__(name)

    @property
    def weight(self) -> Tensor:
        """All hidden-to-hidden weights: (num_layers·directions, gates·n, m), in the order of the hidden states.

        These are computed, as is each ``weight_hh_l{k}[_reverse]``: to change them, use ``set_weight_``.
        """
        return computed(self._weight())

    def _weight(self) -> Tensor:
        return torch.stack(self._hidden_weights())

    def set_weight_(self: Self, weight: Tensor) -> Self:
        """Makes ``weight`` the hidden-to-hidden weights: (num_layers·directions, gates·n, m), each as ``LinearSVD``.

        If the layer's weights are orthogonal, they become the nearest orthogonal matrices.
        """
        return super().set_weight_(weight)

    def _decompose(self, weight: Tensor) -> Factors:
        n, m = self._matrix_shape
        weights = self._matching(weight, (len(self._places()), self._gates * n, m))
        found = [
            self._decompose_named(f"weight_hh_{where}", W) for where, W in zip(self._places(), weights, strict=True)
        ]
        tensors = {name: t for one in found for name, t in one.tensors.items()}
        return Factors(tensors, max(one.change for one in found))

    def _form(self) -> list[Tensor]:
        return [self._dense(where) for where in self._places()]

    def _hidden_weights(self) -> list[Tensor]:
        cached = self._cached_weight()
        return self._form() if cached is None else cached

    def _weights(self) -> list[list[Tensor]]:
        """The weights for torch's kernels: W_ih, W_hh and, if present, b_ih, b_hh, W_hr of each layer and direction."""
        names = (*(BIASES if self.bias else ()), *(("weight_hr",) if getattr(self, "proj_size", 0) else ()))
        return [
            [getattr(self, f"weight_ih_{where}"), W_hh, *(getattr(self, f"{name}_{where}") for name in names)]
            for where, W_hh in zip(self._places(), self._hidden_weights(), strict=True)
        ]

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        """Returns the last layer's hidden states at all times, and all layers' hidden states after the last time.

        Args:
            input: (time, batch, input_size), (batch, time, input_size) if ``batch_first``, (time, input_size), or a
                packed sequence.
            hx: (num_layers·directions, batch, hidden_size), without the batch if ``input`` has none. Zeros by default.
        """
        if isinstance(input, PackedSequence):
            data, batch_sizes, order, order_back = input
            states = self._initial(data, int(batch_sizes[0]), hx)
            states = states if order is None else [h.index_select(1, order) for h in states]
            output, hidden = self._run(data, states, batch_sizes)
            hidden = hidden if order_back is None else [h.index_select(1, order_back) for h in hidden]
            return PackedSequence(output, batch_sizes, order, order_back), self._as_given(hidden)
        check_tensor("input", input)
        if input.ndim not in (2, 3):
            raise ValueError(f"`input` should have two or three dimensions; got shape {tuple(input.shape)}")
        for h in () if hx is None else self._as_list(hx):
            check_tensor("hx", h)
            if h.ndim != input.ndim:
                raise ValueError(
                    f"`hx` should have as many dimensions as `input`, of shape {tuple(input.shape)}; "
                    f"got {tuple(h.shape)}"
                )
        batch_dim = 0 if self.batch_first else 1
        if input.ndim == 3:
            output, hidden = self._run(input, self._initial(input, input.shape[batch_dim], hx), None)
            return output, self._as_given(hidden)
        hx = None if hx is None else self._as_given([h.unsqueeze(1) for h in self._as_list(hx)])
        output, hidden = self._run(input.unsqueeze(batch_dim), self._initial(input, 1, hx), None)
        return output.squeeze(batch_dim), self._as_given([h.squeeze(1) for h in hidden])

    def _run(self, input: Tensor, states: list[Tensor], batch_sizes: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """The output and the last states. ``batch_sizes``: of a packed sequence with rows ``input``, or None."""
        raise NotImplementedError

    def _by_kernel(
        self, kernel: Any, input: Tensor, states: Any, batch_sizes: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """``_run`` with one of torch's kernels."""
        weights = [t for one_place in self._weights() for t in one_place]
        options = (self.bias, self.num_layers, self.dropout, self.training, self.bidirectional)
        if batch_sizes is not None:
            output, *hidden = kernel(input, batch_sizes, states, weights, *options)
        else:
            output, *hidden = kernel(input, states, weights, *options, self.batch_first)
        return output, hidden

    @staticmethod
    def _for_caller(output: Tensor) -> Tensor:
        """Copies an output that is saved for backward, since the caller may change the returned tensor in place."""
        return output.clone() if torch.is_grad_enabled() and output.requires_grad else output

    def _as_list(self, hx: Any) -> list[Tensor]:
        return [hx]

    def _as_given(self, states: list[Tensor]) -> Any:
        return states[0]

    def _state_names(self) -> dict[str, int]:
        """Maps each state's name in error messages to its size."""
        return {"hx": self.hidden_size}

    def _initial(self, input: Tensor, batch: int, hx: Any) -> list[Tensor]:
        """Checks ``input`` and ``hx``, and returns ``hx`` or zeros."""
        if input.shape[-1] != self.input_size:
            raise ValueError(f"`input` should have last dimension {self.input_size}; got shape {tuple(input.shape)}")
        dtype = self.weight_ih_l0.dtype
        if input.dtype != dtype and not autocast_enabled(input):
            raise ValueError(f"`input` should have the layer's dtype, {dtype}; got {input.dtype}")
        names = self._state_names()
        shapes = {name: (len(self._places()), batch, size) for name, size in names.items()}
        if hx is None:
            return [input.new_zeros(shape) for shape in shapes.values()]
        states = self._as_list(hx)
        for h, (name, shape) in zip(states, shapes.items(), strict=True):
            check_tensor(name, h)
            if h.shape != shape:
                raise ValueError(
                    f"`{name}` should have shape {shape}, or {shape[::2]} for unbatched input; got {tuple(h.shape)}"
                )
            if h.dtype != input.dtype and not autocast_enabled(input):
                raise ValueError(f"`{name}` should have the dtype of `input`, {input.dtype}; got {h.dtype}")
        return states

    def _dense_names(self) -> dict[str, tuple[str, ...]]:
        places = self._places()
        return {f"weight_hh_{where}": tuple(f"{name}_{where}" for name in self._factors_of_one) for where in places}

    def _decompose_named(self, name: str, weight: Tensor) -> Factors:
        n, m = self._matrix_shape
        weight = self._matching(weight, (self._gates * n, m))
        with torch.device("meta"):
            gate = self._new_gate("identity", dtype=weight.dtype)
        found = [gate._decompose(matrix) for matrix in weight.chunk(self._gates)]
        # The relative change of the whole weight is at most the largest relative change of a gate.
        return Factors(
            self._stacked([one.tensors for one in found], self._place(name)), max(one.change for one in found)
        )

    def flatten_parameters(self) -> None:
        """Does nothing. Exists for code that is written for ``torch.nn``."""

    @staticmethod
    def _dense_weights(dense: Any) -> tuple[str, ...]:
        return tuple(name for name, _ in dense.named_parameters(remove_duplicate=False) if name.startswith("weight_hh"))

    @classmethod
    def _convert(cls, dense: Any, spectrum: Spectrum, reflectors: str, rank: int | None) -> tuple[Any, str]:
        return cls._from_dense(dense, spectrum=spectrum), ""

    @classmethod
    def _from_dense(cls: type[Self], dense: Any, **options: Any) -> Self:
        if not isinstance(dense, cls._twin):
            raise TypeError(
                f"`{cls._twin.__name__.lower()}` should be an nn.{cls._twin.__name__}; got {type(dense).__name__}"
            )
        layer: Self = nn.utils.skip_init(cls, **_arguments(dense, cls), **_like(dense), **options)
        for name, parameter in dense.named_parameters(remove_duplicate=False):
            if name.startswith("weight_hh_"):
                found = layer._decompose_named(name, parameter).tensors
                layer._write(**found)
                for factor in found:
                    getattr(layer, factor).requires_grad_(parameter.requires_grad)
            else:
                _copy(parameter, getattr(layer, name))
        return layer.train(dense.training)

    def _to_dense(self) -> Any:
        like = _like(self)
        dense = self._twin(**_arguments(self, type(self)), device="meta", dtype=like["dtype"]).to_empty(
            device=like["device"]
        )
        factors = self._dense_names()
        for name, parameter in dense.named_parameters():
            _copy(getattr(self, name), parameter)
            if name in factors:  # requires gradients if one of its factors does
                parameter.requires_grad_(any(getattr(self, factor).requires_grad for factor in factors[name]))
        return dense.train(self.training)

    def extra_repr(self) -> str:
        values = {name: getattr(self, name) for name in self._defaults}
        options = [f"{name}={value!r}" for name, value in values.items() if value != self._defaults[name]]
        weight = "orthogonal" if self.spectrum is None else f"spectrum={self.spectrum}"
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *options, weight])


def _arguments(layer: Any, kind: type[Recurrent]) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in ("input_size", "hidden_size", *kind._defaults)}


def _like(layer: Any) -> dict[str, Any]:
    return {"device": layer.weight_ih_l0.device, "dtype": layer.weight_ih_l0.dtype}


@torch.no_grad()
def _copy(source: Tensor, target: Tensor) -> None:
    """Copies the values and ``requires_grad``."""
    target.copy_(source)
    target.requires_grad_(source.requires_grad)
