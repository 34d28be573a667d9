"""Layers as transforms of nflows, normflows, FrEIA, Zuko and Pyro: by themselves, and among each library's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import FrEIA.framework as freia
import FrEIA.modules
import nflows.distributions
import nflows.flows
import nflows.nn.nets
import nflows.transforms
import normflows
import pyro
import pyro.distributions
import pytest
import torch
import zuko
from layers import FORMS
from normflows.flows.flow_test import FlowTest
from processes import script
from test_flows import LAYERS, POSITIVE, every_layer
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.distributions import MultivariateNormal

import fasth.flows.freia
import fasth.flows.nflows
import fasth.flows.normflows
import fasth.flows.zuko
from fasth import RNNSVD, Conv1dSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric, param_groups
from fasth.tools.twins import definition_weight, perturbed

ForNflows = fasth.flows.nflows.SVDTransform
ForNormflows = fasth.flows.normflows.SVDTransform
ForFreia = fasth.flows.freia.SVDTransform
ForZuko = fasth.flows.zuko.SVDTransform


class Library(NamedTuple):
    """One library: makes a transform of a layer, and calls it for a batch's y and log |det|."""

    make: Callable[[Any, tuple[int, ...]], Any]
    forward: Callable[[Any, Tensor], tuple[Tensor, Tensor]]
    inverse: Callable[[Any, Tensor], tuple[Tensor, Tensor]]


def of_tuple(result: tuple[tuple[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    (y,), logabsdet = result
    return y, logabsdet


LIBRARIES = {
    "nflows": Library(lambda layer, _: ForNflows(layer), lambda m, x: m(x), lambda m, y: m.inverse(y)),
    "normflows": Library(lambda layer, _: ForNormflows(layer), lambda m, x: m(x), lambda m, y: m.inverse(y)),
    "FrEIA": Library(
        lambda layer, event: ForFreia([event], layer),
        lambda m, x: of_tuple(m((x,))),
        lambda m, y: of_tuple(m((y,), rev=True)),
    ),
    "Zuko": Library(
        lambda layer, _: ForZuko(layer),
        lambda m, x: m().call_and_ladj(x),
        lambda m, y: m.inv().call_and_ladj(y),
    ),
}
every_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES.keys())


def of_definition(layer: Any, x: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """y and log |det|, or x of y, from the dense weight that is made one reflection at a time."""
    W = definition_weight(layer)
    logabsdet = torch.linalg.slogdet(W).logabsdet * x[0, 0].numel() * x.new_ones(len(x))
    bias = 0 if layer.bias is None else layer.bias.reshape(-1, *(1 for _ in x.shape[2:]))
    if inverse:
        return torch.einsum("oi,ni...->no...", torch.linalg.inv(W), x - bias), -logabsdet
    return torch.einsum("oi,ni...->no...", W, x) + bias, logabsdet


@every_library
@every_layer
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_values_and_gradients_are_those_of_the_definition(
    library: Library, make: Any, event: tuple[int, ...], form: str, inverse: bool
) -> None:
    layer = perturbed(make(dtype=torch.float64, reflectors=form))
    transform = library.make(layer, event)
    x = torch.randn(3, *event, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(x), torch.randn(3, dtype=torch.float64)
    results = (library.inverse if inverse else library.forward)(transform, x), of_definition(layer, x, inverse)
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)
    variables = [x, *(p for p in layer.parameters() if p.requires_grad)]
    gradients, references = (
        torch.autograd.grad(sum((w * t).sum() for w, t in zip(weights, result, strict=True)), variables)
        for result in results
    )
    torch.testing.assert_close(gradients, references)


@every_library
@every_layer
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_the_determinant_is_that_of_the_jacobian(
    library: Library, make: Any, event: tuple[int, ...], batch: int
) -> None:
    transform = library.make(perturbed(make(dtype=torch.float64)), event)
    x = torch.randn(batch, *event, dtype=torch.float64)
    y, logabsdet = library.forward(transform, x)
    back, opposite = library.inverse(transform, y)
    assert y.shape == x.shape and logabsdet.shape == opposite.shape == (batch,)
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(opposite, -logabsdet)
    for function, values, inputs in ((library.forward, logabsdet, x), (library.inverse, opposite, y)):
        for value, sample in zip(values, inputs, strict=True):
            J = jacobian(lambda t, f=function: f(transform, t[None])[0][0], sample)
            torch.testing.assert_close(torch.linalg.slogdet(J.reshape(sample.numel(), -1)).logabsdet, value)


@every_library
def test_a_determinant_can_be_written_into(library: Library) -> None:
    """Many flows write ``log_det += ...``, so each sample needs its own number in memory."""
    transform = library.make(LinearSVD(4, 4, spectrum=POSITIVE), (4,))
    for function in (library.forward, library.inverse):
        _, logabsdet = function(transform, torch.randn(3, 4))
        before = logabsdet.clone()
        logabsdet += torch.arange(3.0)
        torch.testing.assert_close(logabsdet, before + torch.arange(3.0))


@every_library
@every_layer
def test_is_a_module_with_the_parameters_of_the_layer(library: Library, make: Any, event: tuple[int, ...]) -> None:
    layer = perturbed(make())
    transform = library.make(layer, event)
    assert [*map(id, transform.parameters())] == [*map(id, layer.parameters())]
    assert set(transform.state_dict()) == {f"layer.{name}" for name in layer.state_dict()}
    x = torch.randn(3, *event)
    expected = library.forward(transform, x)
    for other in (copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
        torch.testing.assert_close(library.forward(other, x), expected, rtol=0, atol=0)
        assert not set(map(id, other.parameters())) & set(map(id, layer.parameters()))
    y, logabsdet = library.forward(transform.double(), x.double())
    assert y.dtype == logabsdet.dtype == torch.float64
    torch.testing.assert_close(y.float(), expected[0])


@every_library
def test_sigma_has_its_rate(library: Library) -> None:
    layer = LinearSVD(9, 9, spectrum=POSITIVE)
    transform = library.make(layer, (9,))
    rates, expected = (
        {id(p): group["lr"] for group in param_groups(m, lr=0.01) for p in group["params"]} for m in (transform, layer)
    )
    assert rates == expected and rates[id(layer.sigma)] > 0.01


@every_library
@pytest.mark.parametrize(
    ("layer", "event", "error", "message"),
    [
        (lambda: LinearSVD(3, 4), (3,), ValueError, "needs a square layer; got 3 input and 4 output features"),
        (lambda: LinearOrthogonal(3, 4), (3,), ValueError, "needs a square layer"),
        (lambda: Conv2dSVD(3, 3, 3), (3, 4, 4), ValueError, "needs a 1×1 kernel, equal channels"),
        (lambda: Conv1dSVD(3, 4, 1), (3, 4), ValueError, "needs a 1×1 kernel, equal channels"),
        (lambda: LinearSVD(3, 3, rank=2), (3,), ValueError, "needs a layer of full rank; got LinearSVD.*rank=2"),
        (lambda: Conv1dSVD(3, 3, 1, rank=1), (3, 4), ValueError, "needs a layer of full rank; got Conv1dSVD.*rank=1"),
        (lambda: nn.Linear(3, 3), (3,), TypeError, "`layer` should be one of LinearSVD, .*; got Linear"),
        (lambda: RNNSVD(3, 3), (3,), TypeError, "`layer` should be one of LinearSVD, .*; got RNNSVD"),
        (lambda: LinearSVD, (3,), TypeError, "`layer` should be one of LinearSVD, .*; got type"),
    ],
)
def test_layers_that_have_no_inverse(
    library: Library, layer: Callable[[], Any], event: tuple[int, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        library.make(layer(), event)


@pytest.mark.parametrize("name", ["nflows", "normflows", "FrEIA"])
@pytest.mark.parametrize(
    ("case", "shape", "expected"),
    [
        ("LinearSVD", (5,), r"\(batch, 5\) to match LinearSVD\(.*\); got \(5,\)"),
        ("LinearSVD", (2, 4), r"\(batch, 5\) .*; got \(2, 4\)"),
        ("LinearSVD", (2, 5, 5), r"\(batch, 5\) .*; got \(2, 5, 5\)"),
        ("Conv1dSVD", (2, 3), r"\(batch, 3, length\) .*; got \(2, 3\)"),
        ("Conv2dSVD", (3, 2, 4), r"\(batch, 3, height, width\) to match Conv2dSVD\(.*\); got \(3, 2, 4\)"),
        ("Conv2dSVD", (2, 4, 3, 3), r"\(batch, 3, height, width\) .*; got \(2, 4, 3, 3\)"),
    ],
)
def test_inputs_of_the_wrong_shape(name: str, case: str, shape: tuple[int, ...], expected: str) -> None:
    library, (make, event) = LIBRARIES[name], LAYERS[case]
    transform = library.make(make(), event)
    for function in (library.forward, library.inverse):
        with pytest.raises(ValueError, match=f"the input should have shape {expected}"):
            function(transform, torch.randn(shape))


# Densities in closed form: they have the layer in the direction that the documentation says.


def normal(mean: Tensor, covariance: Tensor) -> MultivariateNormal:
    return MultivariateNormal(mean, (covariance + covariance.mT) / 2)


@pytest.fixture
def layer() -> LinearSVD:
    return perturbed(LinearSVD(4, 4, spectrum=POSITIVE, dtype=torch.float64))


def of_layer_to_noise(layer: LinearSVD) -> MultivariateNormal:
    """The distribution of x if W x + bias is standard normal."""
    inverse = layer.weight.inverse()
    return normal(-inverse @ layer.bias, inverse @ inverse.mT)


def of_layer_to_data(layer: LinearSVD) -> MultivariateNormal:
    """The distribution of W x + bias if x is standard normal."""
    return normal(layer.bias, layer.weight @ layer.weight.mT)


def standard(d: int) -> zuko.lazy.UnconditionalDistribution:
    loc, scale = torch.zeros(d, dtype=torch.float64), torch.ones(d, dtype=torch.float64)
    return zuko.lazy.UnconditionalDistribution(zuko.distributions.DiagNormal, loc, scale, buffer=True)


def test_density_of_nflows(layer: LinearSVD) -> None:
    base = nflows.distributions.StandardNormal([4]).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    flow = nflows.flows.Flow(ForNflows(layer), base)
    torch.testing.assert_close(flow.log_prob(x), of_layer_to_noise(layer).log_prob(x))
    flow = nflows.flows.Flow(nflows.transforms.InverseTransform(ForNflows(layer)), base)
    torch.testing.assert_close(flow.log_prob(x), of_layer_to_data(layer).log_prob(x))


def test_density_of_normflows(layer: LinearSVD) -> None:
    base = normflows.distributions.DiagGaussian(4, trainable=False).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    flow = normflows.NormalizingFlow(base, [ForNormflows(layer)])
    torch.testing.assert_close(flow.log_prob(x), of_layer_to_data(layer).log_prob(x))
    samples, log_prob = flow.sample(5)
    torch.testing.assert_close(log_prob, of_layer_to_data(layer).log_prob(samples))
    flow = normflows.NormalizingFlow(base, [normflows.flows.Reverse(ForNormflows(layer))])
    torch.testing.assert_close(flow.log_prob(x), of_layer_to_noise(layer).log_prob(x))


def test_density_of_freia(layer: LinearSVD) -> None:
    inn = freia.SequenceINN(4)
    inn.append(ForFreia, layer=layer)
    x = torch.randn(6, 4, dtype=torch.float64)
    z, logabsdet = inn(x)
    base = normal(torch.zeros(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(base.log_prob(z) + logabsdet, of_layer_to_noise(layer).log_prob(x))


def test_density_of_zuko(layer: LinearSVD) -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    for transform, expected in (
        (ForZuko(layer), of_layer_to_noise(layer)),
        (ForZuko(layer).inv, of_layer_to_data(layer)),
        (ForZuko(layer).inv.inv, of_layer_to_noise(layer)),
    ):
        flow = zuko.flows.Flow([transform], standard(4))
        torch.testing.assert_close(flow().log_prob(x), expected.log_prob(x))
        samples, log_prob = flow().rsample_and_log_prob((5,))
        torch.testing.assert_close(log_prob, expected.log_prob(samples))


def test_density_of_pyro(layer: LinearSVD) -> None:
    base = pyro.distributions.Normal(torch.zeros(4, dtype=torch.float64), 1.0).to_event(1)
    flow = pyro.distributions.TransformedDistribution(base, [fasth.SVDTransform(layer)])
    x = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(flow.log_prob(x), of_layer_to_data(layer).log_prob(x))
    assert flow.rsample((5,)).shape == (5, 4)


# Among the library's own transforms.


def correlated() -> Tensor:
    return torch.randn(200, 4) @ torch.tensor([[2.0, 1, 0, 0], [0, 0.5, 0, 1], [0, 0, 3, 1], [0, 0, 0, 1]]) + 1


def trained(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
    """It learns a normal distribution, to 0.1 of the best that there is, and every parameter of the layers helps."""
    data = correlated()
    optimizer = torch.optim.Adam(param_groups(model, lr=0.02, optimizer=torch.optim.Adam))
    for _ in range(150):
        value = loss(data)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    fitted = MultivariateNormal(data.mean(0), data.mT.cov(correction=0))
    assert value < -fitted.log_prob(data).mean() + 0.1
    layers = [m for m in model.modules() if isinstance(m, (LinearSVD, LinearSymmetric, LinearOrthogonal))]
    assert layers
    for layer in layers:
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in layer.parameters())


def layers_of_four() -> tuple[LinearSVD, LinearOrthogonal]:
    return LinearSVD(4, 4, spectrum=POSITIVE), LinearOrthogonal(4, 4)


def test_training_in_nflows() -> None:
    first, second = layers_of_four()

    def network(inputs: int, outputs: int) -> nn.Module:
        return nflows.nn.nets.ResidualNet(inputs, outputs, hidden_features=8, num_blocks=1)

    coupling = nflows.transforms.AffineCouplingTransform(torch.tensor([1, -1, 1, -1]), network)
    transform = nflows.transforms.CompositeTransform([ForNflows(first), coupling, ForNflows(second)])
    flow = nflows.flows.Flow(transform, nflows.distributions.StandardNormal([4]))
    trained(flow, lambda x: -flow.log_prob(x).mean())
    assert flow.sample(3).shape == (3, 4)
    samples, log_prob = flow.sample_and_log_prob(3)
    torch.testing.assert_close(flow.log_prob(samples), log_prob, rtol=1e-3, atol=1e-3)


def test_training_in_normflows() -> None:
    first, second = layers_of_four()
    network = normflows.nets.MLP([2, 8, 4], init_zeros=True)
    flows = [ForNormflows(second), normflows.flows.AffineCouplingBlock(network), ForNormflows(first)]
    flow = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(4, trainable=False), flows)
    trained(flow, flow.forward_kld)
    samples, log_prob = flow.sample(3)
    torch.testing.assert_close(flow.log_prob(samples), log_prob, rtol=1e-3, atol=1e-3)


def test_training_in_freia() -> None:
    first, second = layers_of_four()

    def network(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))

    inn = freia.SequenceINN(4)
    inn.append(ForFreia, layer=first)
    inn.append(FrEIA.modules.AllInOneBlock, subnet_constructor=network)
    inn.append(ForFreia, layer=second)

    def loss(x: Tensor) -> Tensor:
        z, logabsdet = inn(x)
        return -(torch.distributions.Normal(0, 1).log_prob(z).sum(-1) + logabsdet).mean()

    trained(inn, loss)
    x = torch.randn(3, 4)
    z, logabsdet = inn(x)
    back, opposite = inn(z, rev=True)
    torch.testing.assert_close(back, x, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(opposite, -logabsdet, rtol=1e-3, atol=1e-3)


def test_training_in_zuko() -> None:
    first, second = layers_of_four()
    coupling = zuko.flows.GeneralCouplingTransform(4, hidden_features=(8,))
    flow = zuko.flows.Flow([ForZuko(first), coupling, ForZuko(second)], standard(4).float())
    trained(flow, lambda x: -flow().log_prob(x).mean())
    samples, log_prob = flow().rsample_and_log_prob((3,))
    torch.testing.assert_close(flow().log_prob(samples), log_prob, rtol=1e-3, atol=1e-3)


def test_training_in_pyro() -> None:
    """The parameters of ``pyro.module`` are those of the layers, and a step of SVI changes them."""
    pyro.clear_param_store()
    transforms = nn.ModuleList(fasth.SVDTransform(layer) for layer in layers_of_four())
    coupling = pyro.distributions.transforms.affine_coupling(4, hidden_dims=[8])
    base = pyro.distributions.Normal(torch.zeros(4), 1.0).to_event(1)
    flow = pyro.distributions.TransformedDistribution(base, [transforms[1], coupling, transforms[0]])

    def model(data: Tensor) -> None:
        pyro.module("transforms", transforms)
        pyro.module("coupling", coupling)
        with pyro.plate("data", len(data)):
            pyro.sample("x", flow, obs=data)

    svi = pyro.infer.SVI(model, lambda _: None, pyro.optim.Adam({"lr": 0.02}), pyro.infer.Trace_ELBO())
    data, before = correlated(), copy.deepcopy(transforms)
    losses = [svi.step(data) / len(data) for _ in range(150)]
    assert losses[-1] < losses[0] - 1
    for name, parameter in before.named_parameters():
        assert not torch.equal(parameter, transforms.get_parameter(name))
        assert pyro.param(f"transforms$$${name}") is transforms.get_parameter(name)
    pyro.clear_param_store()


def test_images_in_nflows() -> None:
    ours = ForNflows(perturbed(Conv2dSVD(4, 4, 1, spectrum=POSITIVE)))
    transform = nflows.transforms.CompositeTransform([nflows.transforms.SqueezeTransform(), ours])
    flow = nflows.flows.Flow(transform, nflows.distributions.StandardNormal([4, 2, 2]))
    samples, log_prob = flow.sample_and_log_prob(3)
    assert samples.shape == (3, 1, 4, 4)
    torch.testing.assert_close(flow.log_prob(samples), log_prob)


def test_several_scales_in_nflows() -> None:
    transform = nflows.transforms.MultiscaleCompositeTransform(2)
    shape = transform.add_transform(ForNflows(perturbed(Conv2dSVD(4, 4, 1, spectrum=POSITIVE))), (4, 2, 2))
    transform.add_transform(ForNflows(perturbed(Conv2dSVD(2, 2, 1, spectrum=POSITIVE))), shape)
    x = torch.randn(3, 4, 2, 2)
    z, logabsdet = transform(x)
    assert z.shape == (3, 16) and logabsdet.shape == (3,)
    back, opposite = transform.inverse(z)
    torch.testing.assert_close(back, x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(opposite, -logabsdet)


@every_layer
def test_forward_and_inverse_are_consistent_in_nflows(make: Any, event: tuple[int, ...]) -> None:
    """The checks of nflows' own tests for every transform."""
    transform = ForNflows(perturbed(make(dtype=torch.float64)))
    inverse = nflows.transforms.InverseTransform(transform)
    x = torch.randn(3, *event, dtype=torch.float64)
    for identity in ([inverse, transform], [transform, inverse]):
        outputs, logabsdet = nflows.transforms.CompositeTransform(identity)(x)
        torch.testing.assert_close(outputs, x)
        torch.testing.assert_close(logabsdet, torch.zeros(3, dtype=torch.float64))


def test_a_condition_changes_nothing_in_nflows(layer: LinearSVD) -> None:
    x, context = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    transform = ForNflows(layer)
    assert torch.equal(transform(x, context)[0], transform(x)[0])
    assert torch.equal(transform.inverse(x, context=context)[0], transform.inverse(x)[0])


@every_layer
def test_normflows_own_checks(make: Any, event: tuple[int, ...]) -> None:
    flow = ForNormflows(perturbed(make(dtype=torch.float64)))
    x, context = torch.randn(3, *event, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    FlowTest().checkForwardInverse(flow, x)
    FlowTest().checkForwardInverse(flow, x, context)
    FlowTest().checkForwardInverse(normflows.flows.Reverse(flow), x)
    composite = normflows.flows.Composite([flow, normflows.flows.Permute(event[0]), flow])
    FlowTest().checkForwardInverse(composite, x, atol=1e-6, rtol=1e-6)  # it sums determinants in float32


def test_several_scales_in_normflows() -> None:
    """Glow's architecture, with a layer after every block."""

    def level(channels: int) -> list[nn.Module]:
        layer = perturbed(Conv2dSVD(channels, channels, 1, spectrum=POSITIVE))
        return [normflows.flows.GlowBlock(channels, 8, use_lu=False), ForNormflows(layer), normflows.flows.Squeeze()]

    bases = [normflows.distributions.DiagGaussian((8, 1, 1)), normflows.distributions.DiagGaussian((2, 2, 2))]
    flow = normflows.MultiscaleFlow(bases, [level(8), level(4)], [normflows.flows.Merge()], class_cond=False)
    x = torch.randn(3, 1, 4, 4)
    assert flow.log_prob(x, None).shape == (3,)
    z, logabsdet = flow.inverse_and_log_det(x)
    back, opposite = flow.forward_and_log_det(z)
    torch.testing.assert_close(back, x, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(opposite, -logabsdet, rtol=1e-3, atol=1e-3)
    flow.forward_kld(x).backward()
    assert all(m.layer.sigma.grad.abs().min() > 0 for m in flow.modules() if isinstance(m, ForNormflows))


def test_sampling_and_reverse_kl_in_normflows(layer: LinearSVD) -> None:
    """The KL divergence of two normal distributions in closed form."""
    base = normflows.distributions.DiagGaussian(4, trainable=False).double()
    target = normflows.distributions.DiagGaussian(4, trainable=False).double()
    flow = normflows.NormalizingFlow(base, [ForNormflows(layer)], target)
    expected = torch.distributions.kl_divergence(
        of_layer_to_data(layer), normal(torch.zeros(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))
    )
    found = flow.reverse_kld(num_samples=20000)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    gradients, references = (torch.autograd.grad(value, [layer.sigma, layer.bias]) for value in (found, expected))
    torch.testing.assert_close(gradients, references, rtol=0.1, atol=0.1)


def test_conditions_in_normflows(layer: LinearSVD) -> None:
    """Mean and scale of the base depend on the condition, the layer does not."""
    encoder = nn.Linear(2, 8, dtype=torch.float64)
    base = normflows.distributions.base.ConditionalDiagGaussian(4, encoder)
    flow = normflows.ConditionalNormalizingFlow(base, [ForNormflows(layer)])
    x, context = torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    mean, log_scale = encoder(context).chunk(2, -1)
    W = layer.weight
    covariance = W @ torch.diag_embed((2 * log_scale).exp()) @ W.mT
    expected = normal(mean @ W.mT + layer.bias, covariance)
    torch.testing.assert_close(flow.log_prob(x, context), expected.log_prob(x))
    samples, log_prob = flow.sample(2, context)
    torch.testing.assert_close(log_prob, expected.log_prob(samples))


@pytest.mark.filterwarnings("ignore:ReversibleGraphNet:DeprecationWarning")
@pytest.mark.parametrize("graph", [freia.GraphINN, freia.ReversibleGraphNet])
def test_graphs_of_freia(graph: Any) -> None:
    """Images, downsampled, through two layers and a condition, in FrEIA's own check by finite differences."""
    image, condition = freia.InputNode(1, 4, 4), freia.ConditionNode(3)
    down = freia.Node(image, FrEIA.modules.IRevNetDownsampling, {})
    first = {"layer": perturbed(Conv2dSVD(4, 4, 1, spectrum=POSITIVE))}
    colors = freia.Node(down, ForFreia, first, conditions=condition)
    flat = freia.Node(colors, FrEIA.modules.Flatten, {})
    second = {"layer": perturbed(LinearSymmetric(16, spectrum=POSITIVE))}
    mixed = freia.Node(flat, ForFreia, second)
    inn = graph([image, condition, down, colors, flat, mixed, freia.OutputNode(mixed)], verbose=False).double()
    x, c = torch.randn(3, 1, 4, 4, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    z, logabsdet = inn(x, c=c)
    assert z.shape == (3, 16) and logabsdet.shape == (3,)
    torch.testing.assert_close(inn.log_jacobian_numerical(x, c=c), logabsdet, rtol=1e-4, atol=1e-4)
    back, opposite = inn(z, c=c, rev=True)
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(opposite, -logabsdet)


def test_sequences_of_freia_with_a_condition_and_without_determinants() -> None:
    inn = freia.SequenceINN(3, 5)
    inn.append(ForFreia, cond=0, cond_shape=(2,), layer=perturbed(Conv1dSVD(3, 3, 1, spectrum=POSITIVE)))
    assert inn[0].dims_c == [(2,)] and inn[0].output_dims([(3, 5)]) == [(3, 5)]
    x = torch.randn(4, 3, 5)
    z, _ = inn(x, c=[torch.randn(4, 2)], jac=False)
    torch.testing.assert_close(inn(z, c=[torch.randn(4, 2)], rev=True, jac=False)[0], x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "dims", "message"),
    [
        ("LinearSVD", [(4,)], r"`dims_in` should be \[\(5,\)\] to match LinearSVD\(.*\); got \[\(4,\)\]"),
        ("LinearSVD", [(5, 2, 2)], r"`dims_in` should be \[\(5,\)\] .*; got \[\(5, 2, 2\)\]"),
        ("LinearSVD", [(5,), (5,)], r"`dims_in` should be \[\(5,\)\] .*; got \[\(5,\), \(5,\)\]"),
        ("Conv2dSVD", [(3,)], r"`dims_in` should be \[\(3, height, width\)\] .*; got \[\(3,\)\]"),
        ("Conv2dSVD", [(4, 2, 2)], r"`dims_in` should be \[\(3, height, width\)\] .*; got \[\(4, 2, 2\)\]"),
        ("Conv1dSVD", [(3, 2, 2)], r"`dims_in` should be \[\(3, length\)\] .*; got \[\(3, 2, 2\)\]"),
    ],
)
def test_dimensions_that_do_not_fit_the_layer(case: str, dims: list[tuple[int, ...]], message: str) -> None:
    make, _ = LAYERS[case]
    with pytest.raises(ValueError, match=message):
        ForFreia(dims, make())


def test_images_and_conditions_in_zuko() -> None:
    layer = perturbed(Conv2dSVD(3, 3, 1, spectrum=POSITIVE))
    transform = ForZuko(layer)(torch.randn(7))
    assert isinstance(transform, fasth.SVDTransform) and transform.layer is layer
    x = torch.randn(2, 5, 3, 4, 4)
    y, logabsdet = transform.call_and_ladj(x)
    assert y.shape == x.shape and logabsdet.shape == (2, 5)
    coupling = zuko.flows.GeneralCouplingTransform(4, context=7, hidden_features=(8,))
    flow = zuko.flows.Flow([coupling, ForZuko(LinearSVD(4, 4))], standard(4).float())
    assert flow(torch.randn(6, 7)).log_prob(torch.randn(6, 4)).shape == (6,)
    assert flow(torch.randn(6, 7)).sample((2,)).shape == (2, 6, 4)


def test_importing_fasth_imports_no_flow_library() -> None:
    names = ("nflows", "normflows", "FrEIA", "zuko", "pyro")
    code = f"import sys, fasth, fasth.flows; print(*(name for name in {names} if name in sys.modules))"
    assert script(code).strip() == ""


@pytest.mark.parametrize("name", ["nflows", "normflows", "freia", "zuko"])
def test_an_adapter_has_one_public_name(name: str) -> None:
    assert getattr(fasth.flows, name).__all__ == ["SVDTransform"]
