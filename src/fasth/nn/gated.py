"""LSTM and GRU, each gate's hidden-to-hidden matrix held as its singular value decomposition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fasth.nn.factors import spectrum_or_free
from fasth.nn.recurrent import Recurrent
from fasth.spectrum import Spectrum

_DEFAULTS = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}


class LSTMSVD(Recurrent, converts=nn.LSTM):
    """``nn.LSTM`` with the hidden-to-hidden matrix of each gate held, and trained, as W = U diag(σ) Vᵀ.

    ``nn.LSTM``'s signature, shapes and parameters, except that each ``weight_hh_l{k}[_reverse]``: (4·hidden, m), with
    m = hidden, or ``proj_size`` if that is not 0, is made of ``reflectors_l{k}[_reverse]``: (4·hidden, m) and
    ``sigma_l{k}[_reverse]``: (4·min(hidden, m),), those of the input, forget, cell and output gates one below the
    other, as ``LinearSVD`` has them. It can be read as an attribute; ``svds`` has the SVDs, a batch of four for each.

    Args:
        input_size, …, dtype: those of ``nn.LSTM``.
        spectrum: the map from the parameters ``sigma`` to σ, of ``fasth.spectrum``, for all gates. The default is
            ``free()``.
        init: "haar", "identity", "henaff" or "cayley": the orthogonal matrix that each gate starts with, as in
            ``RNNSVD``. All else is drawn as in ``nn.LSTM``.

    The weights are formed once per call, and within ``fasth.cached()`` once, and handed to torch's kernel.
    """

    _twin = nn.LSTM
    _gates = 4
    _defaults = _DEFAULTS | {"proj_size": 0}

    proj_size: int

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spectrum: Spectrum | None = None,
        init: str = "haar",
    ) -> None:
        super().__init__()
        options = (num_layers, bias, batch_first, dropout, bidirectional, proj_size)
        dense = nn.LSTM(input_size, hidden_size, *options, device="meta")
        self._add_parameters(dense, spectrum_or_free(spectrum), init, device, dtype)
        self.reset_parameters()

    def _run(self, input: Tensor, states: list[Tensor], batch_sizes: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        output, hidden = self._by_kernel(torch.lstm, input, states, batch_sizes)
        return self._for_caller(output), hidden

    def _as_list(self, hx: Any) -> list[Tensor]:
        if not isinstance(hx, (tuple, list)) or len(hx) != 2:
            raise TypeError(f"`hx` should be a tuple of two tensors, h_0 and c_0; got {type(hx).__name__}")
        return list(hx)

    def _as_given(self, states: list[Tensor]) -> Any:
        return tuple(states)

    def _state_names(self) -> dict[str, int]:
        return {"hx[0]": self.proj_size or self.hidden_size, "hx[1]": self.hidden_size}

    @classmethod
    def from_lstm(cls, lstm: nn.LSTM, *, spectrum: Spectrum | None = None) -> LSTMSVD:
        """The layer with the weights, biases, dtype, device and mode of an ``nn.LSTM``, as ``RNNSVD.from_rnn``."""
        return cls._from_dense(lstm, spectrum=spectrum)

    def to_lstm(self) -> nn.LSTM:
        """An ``nn.LSTM`` with this layer's weights, biases, dtype, device and mode. They share no memory."""
        return self._to_dense()


class GRUSVD(Recurrent, converts=nn.GRU):
    """``nn.GRU`` with the hidden-to-hidden matrix of each gate held, and trained, as W = U diag(σ) Vᵀ.

    ``nn.GRU``'s signature, shapes and parameters; the three matrices of ``weight_hh_l{k}[_reverse]``: (3·hidden,
    hidden), of the reset, update and new gates, are held as the four of ``LSTMSVD``. The arguments are the same, too.
    """

    _twin = nn.GRU
    _gates = 3
    _defaults = _DEFAULTS

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spectrum: Spectrum | None = None,
        init: str = "haar",
    ) -> None:
        super().__init__()
        options = (num_layers, bias, batch_first, dropout, bidirectional)
        dense = nn.GRU(input_size, hidden_size, *options, device="meta")
        self._add_parameters(dense, spectrum_or_free(spectrum), init, device, dtype)
        self.reset_parameters()

    def _run(self, input: Tensor, states: list[Tensor], batch_sizes: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        (hx,) = states
        return self._by_kernel(torch.gru, input, hx, batch_sizes)

    @classmethod
    def from_gru(cls, gru: nn.GRU, *, spectrum: Spectrum | None = None) -> GRUSVD:
        """The layer with the weights, biases, dtype, device and mode of an ``nn.GRU``, as ``RNNSVD.from_rnn``."""
        return cls._from_dense(gru, spectrum=spectrum)

    def to_gru(self) -> nn.GRU:
        """An ``nn.GRU`` with this layer's weights, biases, dtype, device and mode. They share no memory."""
        return self._to_dense()
