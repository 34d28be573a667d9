"""fasth.hidden_gradients against the gradients of a loop that is written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fasth import GRUSVD, LSTMSVD, RNNSVD, hidden_gradients, parametrizations

KINDS = {
    "nn.RNN": nn.RNN,
    "nn.LSTM": nn.LSTM,
    "nn.GRU": nn.GRU,
    "RNNSVD": RNNSVD,
    "LSTMSVD": LSTMSVD,
    "GRUSVD": GRUSVD,
    "parametrized": lambda *sizes, **o: parametrizations.orthogonal(nn.RNN(*sizes, **o), "weight_hh_l0"),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


class Net(nn.Module):
    def __init__(self, kind: str, **options) -> None:
        super().__init__()
        self.rnn, self.head = KINDS[kind](3, 5, dtype=torch.float64, **options), nn.Linear(5, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@each_kind
@pytest.mark.parametrize("batch_first", [False, True])
def test_is_what_the_loss_feels_of_a_change(kind, batch_first):
    """A change of the state at t, of both states of an LSTM, by a tiny amount in each entry, one at a time."""
    net, x = Net(kind, batch_first=batch_first), numbers(4, 6, 3)
    time = 1 if batch_first else 0

    def loss_from(t: int, *states: Tensor) -> Tensor:
        """The loss of the outputs from t on, as a function of the states after step t."""
        hx = states if len(states) > 1 else states[0]
        later = x.narrow(time, t + 1, x.shape[time] - t - 1)
        output = [states[0][-1].unsqueeze(time)]
        if later.shape[time]:
            output.append(net.rnn(later, hx)[0])
        return net.head(torch.cat(output, time)).sin().sum()

    norms = hidden_gradients(net, lambda: net(x).sin().sum())["rnn"]
    assert norms.shape == (x.shape[time],)
    for t in range(x.shape[time]):
        _, hx = net.rnn(x.narrow(time, 0, t + 1))
        states = [h.detach() for h in (hx if isinstance(hx, tuple) else (hx,))]
        jacobians = torch.autograd.functional.jacobian(lambda *s, t=t: loss_from(t, *s), tuple(states))
        torch.testing.assert_close(norms[t], sum(j.square().sum() for j in jacobians).sqrt())


@each_kind
def test_leaves_everything_as_it_was(kind):
    net, x = Net(kind), numbers(4, 6, 3)
    before, names = net(x), set(vars(net.rnn))
    net(x).sum().backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    with torch.no_grad():
        hidden_gradients(net, lambda: net(x).square().mean())
    assert set(vars(net.rnn)) == names and torch.equal(net(x), before)
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), gradients, strict=True))


def test_stacks_unbatched_input_and_several_calls():
    net, x = Net("nn.LSTM", num_layers=2), numbers(4, 6, 3)
    found = hidden_gradients(net, lambda: net(x).sum() + net(x[:3]).sum())
    assert {name: len(norms) for name, norms in found.items()} == {"rnn": 4, "rnn, call 2": 3}
    alone = RNNSVD(3, 5)
    assert hidden_gradients(alone, lambda: alone(torch.randn(7, 3))[0].sum())[""].shape == (7,)


def test_an_orthogonal_net_keeps_the_gradient_and_a_plain_one_loses_it():
    torch.manual_seed(0)
    x, ratios = torch.randn(200, 8, 3), {}
    for name, rnn in {"plain": nn.RNN(3, 32), "orthogonal": RNNSVD(3, 32, eps=0)}.items():
        norms = hidden_gradients(rnn, lambda rnn=rnn: rnn(x)[0][-1].sum())[""]
        ratios[name] = (norms[0] / norms[-1]).item()
    assert ratios["plain"] < 1e-10 and ratios["orthogonal"] == pytest.approx(1, abs=1e-3)


def test_frozen_layers_are_left_out():
    first, second = nn.RNN(3, 5).requires_grad_(False), nn.RNN(5, 5)
    model, x = nn.ModuleList([first, second]), torch.randn(4, 6, 3)
    assert list(hidden_gradients(model, lambda: second(first(x)[0])[0].sum())) == ["1"]
    head = nn.Linear(5, 1)
    with pytest.raises(ValueError, match="all are frozen"):
        hidden_gradients(model, lambda: head(first(x)[0]).sum())


def test_a_failure_leaves_the_layer_as_it_was():
    net = Net("nn.RNN")
    with pytest.raises(ZeroDivisionError):
        hidden_gradients(net, lambda: 1 / 0)
    assert "forward" not in vars(net.rnn)
    net.rnn.forward = patched = net.rnn.forward
    hidden_gradients(net, lambda: net(numbers(4, 6, 3)).sum())
    assert vars(net.rnn)["forward"] is patched


def test_shown_and_drawn():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib comes with fasth[reproduce]")
    net, x = Net("RNNSVD"), numbers(4, 6, 3)
    found = hidden_gradients(net, lambda: net(x).sum())
    assert repr(found).startswith("rnn: ") and "at the first of 4 times" in repr(found)
    ax = found.plot()
    assert found.plot(ax, label="again") is ax
    assert [line.get_label() for line in ax.lines] == ["rnn", "again"]
    assert ax.get_yscale() == "log" and ax.lines[0].get_ydata().tolist() == found["rnn"].tolist()
    pyplot.close(ax.figure)


def test_a_mistake_is_explained():
    x = numbers(4, 6, 3)
    net = Net("nn.RNN")
    packed = nn.utils.rnn.pack_sequence([x[0]])
    for model, loss, error, message in [
        ("net", lambda: net(x).sum(), TypeError, "`model` should be a torch.nn.Module; got str"),
        (net, lambda: net.head(x.new_zeros(5)).sum(), ValueError, "`loss` should call a recurrent layer of `model`"),
        (net, net(x).sum(), TypeError, "`loss` should be a function that computes the loss; got Tensor"),
        (net, lambda: net(x), ValueError, "`loss` should return a scalar with a gradient"),
        (net, lambda: net(x).sum().detach(), ValueError, "`loss` should return a scalar with a gradient"),
        (net, lambda: net.rnn(packed)[0].data.sum(), ValueError, "layer `rnn` should get padded sequences"),
        (nn.GRU(3, 5, bidirectional=True), lambda: 0, ValueError, "`model` should run in one direction"),
    ]:
        with pytest.raises(error, match=message):
            hidden_gradients(model, loss)
