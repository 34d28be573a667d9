"""A layer's state: saved, loaded, copied, shared, resumed and made without memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import ALL, CASES, Case, of_every, output
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, skip_init, vector_to_parameters

from fasth import (
    GRUSVD,
    LSTMSVD,
    RNNSVD,
    Conv2dSVD,
    LinearOrthogonal,
    LinearSVD,
    LinearSymmetric,
    spectrum,
    to_dense,
    to_svd,
)
from fasth.reflections import core
from fasth.tools.twins import orthogonality, perturbed


def _by_torch(state: dict[str, Tensor], tmp_path: Any) -> dict[str, Tensor]:
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


def _by_memory_map(state: dict[str, Tensor], tmp_path: Any) -> dict[str, Tensor]:
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True, mmap=True)


def _by_safetensors(state: dict[str, Tensor], tmp_path: Any) -> dict[str, Tensor]:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, tmp_path / "state.safetensors")
    return safetensors.load_file(tmp_path / "state.safetensors")


@of_every(ALL)
@pytest.mark.parametrize("through", [_by_torch, _by_memory_map, _by_safetensors])
def test_state_round_trips_exactly(
    case: Case, through: Callable[..., dict[str, Tensor]], dtype: torch.dtype, tmp_path: Any
) -> None:
    layer, x = perturbed(case.make(dtype=dtype)), case.input(dtype)
    state = through(layer.state_dict(), tmp_path)
    for assign in (False, True):
        other = case.make(dtype=dtype)
        assert not other.load_state_dict(copy.copy(state), assign=assign).missing_keys
        for name, t in layer.state_dict().items():
            assert torch.equal(other.state_dict()[name], t)
        with torch.no_grad():
            assert torch.equal(output(other, x), output(layer, x))
            assert torch.equal(output(other.eval(), x), output(copy.deepcopy(layer).eval(), x))


@of_every(CASES)
def test_models_by_safetensors(case: Case, tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = (nn.Sequential(perturbed(case.make())) for _ in range(2))
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    safetensors.load_model(other, str(tmp_path / "model.safetensors"))
    x = case.input()
    assert torch.equal(output(other, x), output(model, x))


@of_every(CASES)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies(case: Case, duplicate: Callable[[Any], Any]) -> None:
    layer, x = perturbed(case.make()).eval(), case.input()
    with torch.no_grad():
        expected = output(layer, x)
        other = duplicate(layer)
        perturbed(layer)
        assert torch.equal(output(other, x), expected)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        assert torch.equal(output(loaded, x), output(layer, x))


@of_every(ALL)
def test_resuming_gives_the_same_steps(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(core, "_core", None)  # bit for bit is the promise of the PyTorch path

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[Tensor]:
        generator, losses = torch.Generator().manual_seed(seed), []
        for _ in range(4):
            x = torch.randn(case.input_shape, generator=generator)
            loss = (output(model, x) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *(p.detach().clone() for p in model.parameters())]

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = case.make()
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    model, optimizer = start()
    steps(model, optimizer, 1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    expected = steps(model, optimizer, 2)
    model, optimizer = start()
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for t, reference in zip(steps(model, optimizer, 2), expected, strict=True):
        assert torch.equal(t, reference)


# Parameters alone determine a layer


@of_every(ALL)
def test_parameters_alone_determine_a_layer(case: Case) -> None:
    """Averages and probabilistic programs store the parameters alone, without buffers."""
    layer, other = (case.make(dtype=torch.float64) for _ in range(2))
    x = case.input(torch.float64)
    with torch.no_grad():
        expected = output(layer, x)
        assert not torch.allclose(output(other, x), expected)
        for p, q in zip(other.parameters(), layer.parameters(), strict=True):
            p.copy_(q)
        assert torch.equal(output(other, x), expected)
        vector_to_parameters(parameters_to_vector(case.make(dtype=torch.float64).parameters()), other.parameters())
        vector_to_parameters(parameters_to_vector(layer.parameters()), other.parameters())
        assert torch.equal(output(other, x), expected)
    assert not list(other.buffers()) or {name for name, _ in other.named_buffers()} == {"_layout"}


@of_every(ALL)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.05),
        lambda parameters: torch.optim.Adam(parameters, lr=0.05, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.5, amsgrad=True),
    ],
    ids=["SGD", "Adam", "AdamW"],
)
def test_training_leaves_the_signs_alone(case: Case, optimizer: Callable[..., Any]) -> None:
    """Over many steps, and with so much decay that without a gradient the diagonal would pass through zero."""
    layer = case.make()
    before = signs(layer)
    steps = optimizer(layer.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(150):
        steps.zero_grad()
        output(layer, torch.randn(case.input_shape, generator=generator)).square().mean().backward()
        steps.step()
        assert all(torch.equal(t, signs(layer)[name]) for name, t in before.items())
    with torch.no_grad():  # as decay would after thousands of steps
        for p in layer.parameters():
            if p.requires_grad:
                p.mul_(1e-30).mul_(1e-30)
    assert all(torch.equal(t, signs(layer)[name]) for name, t in before.items())


def signs(layer: nn.Module) -> dict[str, Tensor]:
    """The sign bits of those on a diagonal, and the signs of full reflectors themselves."""
    return {
        name: p.detach().clone() if name == "signs" else p.detach().diagonal(dim1=-2, dim2=-1).signbit()
        for name, p in layer.named_parameters()
        if name == "signs" or (name.split(".")[-1].startswith(("reflectors", "original")) and p.ndim > 1)
    }


@pytest.mark.parametrize("decay", [0.9, 0.999])
def test_an_average_of_parameters_can_be_saved_and_loaded(decay: float) -> None:
    """An average of equal signs is that sign only to rounding."""
    for case in ALL.values():
        layer, x = case.make(), case.input()
        average = copy.deepcopy(layer)
        for _ in range(50):
            perturbed(layer, 0.01)
            for p, q in zip(average.parameters(), layer.parameters(), strict=True):
                p.data.mul_(decay).add_((1 - decay) * q.data)
        loaded = case.make()
        loaded.load_state_dict(average.state_dict())
        assert torch.equal(output(loaded, x), output(average, x))


# Made without memory


@of_every(CASES)
def test_meta_to_empty_and_reset(case: Case, path: str) -> None:
    torch.manual_seed(3)
    expected = case.make()
    layer = case.make(device="meta")
    assert all(t.is_meta for t in layer.state_dict().values())
    assert output(layer, case.input().to("meta")).is_meta
    layer.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    for name, t in expected.state_dict().items():
        assert torch.equal(layer.state_dict()[name], t)
    other = case.make(device="meta")
    other.load_state_dict(layer.state_dict(), assign=True)
    x = case.input()
    assert torch.equal(output(other, x), output(layer, x))
    assert {n: p.requires_grad for n, p in other.named_parameters()} == {
        n: not n.endswith("signs") for n, _ in layer.named_parameters()
    }


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (LinearSVD, (4, 3)),
        (LinearSymmetric, (4,)),
        (LinearOrthogonal, (4, 3)),
        (Conv2dSVD, (3, 4, 2)),
        (RNNSVD, (3, 4)),
        (LSTMSVD, (3, 4)),
    ],
)
def test_skip_init_draws_nothing(kind: Any, arguments: tuple[int, ...]) -> None:
    state = torch.get_rng_state()
    layer = skip_init(kind, *arguments, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), state)
    assert {t.dtype for t in layer.state_dict().values()} == {torch.float64}
    assert all(t.device.type == "cpu" for t in layer.state_dict().values())


# Shared with other processes


@of_every(ALL)
def test_share_memory(case: Case) -> None:
    layer, x = perturbed(case.make()).eval(), case.input()
    with torch.no_grad():
        expected = output(layer, x)
        layer.share_memory()
        assert all(t.is_shared() for t in layer.state_dict().values())
        torch.testing.assert_close(output(layer, x), expected)
        for p in layer.parameters():  # as another process would, which no version counts
            p.data.mul_(1.1)
        after = output(layer, x)
        torch.testing.assert_close(after, output(copy.deepcopy(layer).eval(), x))
        assert not torch.allclose(after, expected, rtol=1e-3)


def _train(layer: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    output(layer, x).square().sum().backward()
    optimizer.step()


def test_training_in_another_process() -> None:
    layer, x = LinearSVD(4, 3).eval(), torch.randn(2, 4)
    layer.share_memory()
    with torch.no_grad():
        before = layer(x)
    process = torch.multiprocessing.get_context("spawn").Process(target=_train, args=(layer, x))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    with torch.no_grad():
        after = layer(x)
    assert after.square().sum() < before.square().sum()
    assert orthogonality(layer.svd.U.dense()) < 30


# The checkpoint of a dense layer

TWINS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[int, ...]]] = {
    "LinearSVD": (lambda **o: LinearSVD(6, 4, **o), lambda **o: nn.Linear(6, 4, **o), (3, 6)),
    "LinearSVD, full": (lambda **o: LinearSVD(4, 6, reflectors="full", **o), lambda **o: nn.Linear(4, 6, **o), (3, 4)),
    "Conv2dSVD": (lambda **o: Conv2dSVD(3, 4, 2, **o), lambda **o: nn.Conv2d(3, 4, 2, **o), (2, 3, 5, 5)),
    "RNNSVD": (
        lambda **o: RNNSVD(3, 5, 2, "tanh", bidirectional=True, spectrum=spectrum.free(), **o),
        lambda **o: nn.RNN(3, 5, 2, bidirectional=True, **o),
        (4, 2, 3),
    ),
    "LSTMSVD": (
        lambda **o: LSTMSVD(3, 5, 2, bidirectional=True, **o),
        lambda **o: nn.LSTM(3, 5, 2, bidirectional=True, **o),
        (4, 2, 3),
    ),
    "GRUSVD": (lambda **o: GRUSVD(3, 5, **o), lambda **o: nn.GRU(3, 5, **o), (4, 2, 3)),
}
every_twin = pytest.mark.parametrize(("make", "dense", "shape"), TWINS.values(), ids=TWINS.keys())


@every_twin
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_dense_checkpoint_is_converted(make: Any, dense: Any, shape: Any, assign: bool, device: str) -> None:
    if device == "meta" and not assign:
        return
    twin = nn.Sequential(dense())
    model = nn.Sequential(make(device=device)).eval()
    state = twin.state_dict()
    before = dict(state)
    result = model.load_state_dict(state, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert state.keys() == before.keys()
    x = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(output(model[0], x), output(twin[0], x), rtol=1e-4, atol=1e-5)
    parameters = dict(model.named_parameters())
    assert all(isinstance(p, nn.Parameter) and p.is_contiguous() for p in parameters.values())
    assert all(p.requires_grad != name.endswith("signs") for name, p in parameters.items())
    output(model[0], x).sum().backward()
    loaded = {t.data_ptr() for t in state.values()}
    assert assign or not any(p.data_ptr() in loaded for p in parameters.values())


@every_twin
def test_a_dense_checkpoint_of_another_dtype(make: Any, dense: Any, shape: Any) -> None:
    state = dense(dtype=torch.bfloat16).state_dict()
    layer = make()
    layer.load_state_dict(state)
    assert {t.dtype for t in layer.state_dict().values()} == {torch.float32}
    name = next(name for name in state if name in ("weight", "weight_hh_l0"))
    torch.testing.assert_close(getattr(layer, name).detach(), state[name].float(), rtol=1e-4, atol=1e-5)
    layer = make(device="meta")
    layer.load_state_dict(state, assign=True)
    assert {t.dtype for t in layer.state_dict().values()} == {torch.bfloat16}


def test_orthogonal_and_symmetric_from_a_dense_checkpoint() -> None:
    W = torch.randn(5, 5)
    layer = LinearOrthogonal(5, 5)
    U, _, Vh = torch.linalg.svd(W)
    nearest = U @ Vh
    change = torch.dist(W, nearest) / W.norm()
    with pytest.warns(
        UserWarning, match=f'"weight" was replaced by the nearest weight .* differs from it by {change:.0%}'
    ):
        layer.load_state_dict({"weight": W, "bias": torch.zeros(5)})
    torch.testing.assert_close(layer.weight.detach(), nearest)
    layer.load_state_dict({"weight": nearest, "bias": torch.zeros(5)})  # without a warning
    torch.testing.assert_close(layer.weight.detach(), nearest)
    symmetric = LinearSymmetric(5)
    symmetric.load_state_dict({"weight": W + W.mT, "bias": torch.zeros(5)})
    torch.testing.assert_close(symmetric.weight.detach(), W + W.mT, rtol=1e-4, atol=1e-5)
    before = {name: t.clone() for name, t in symmetric.state_dict().items()}
    with pytest.raises(RuntimeError, match=r'While converting "weight" to reflectors, sigma: .*symmetric') as error:
        symmetric.load_state_dict({"weight": W, "bias": torch.zeros(5)})
    assert "Missing" not in str(error.value)
    assert torch.equal(symmetric.reflectors, before["reflectors"])


def test_a_whole_model() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10), nn.Linear(10, 10, bias=False))
    model = to_svd(copy.deepcopy(plain))
    other = perturbed(copy.deepcopy(model))
    other.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(other(x), plain(x), rtol=1e-4, atol=1e-5)
    for state in (to_dense(other).state_dict(), other.state_dict()):  # and back again, either way
        model.load_state_dict(state)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


def test_a_spectrum_takes_the_nearest() -> None:
    layer = LinearSVD(3, 3, spectrum=spectrum.between(0.5, 2))
    with pytest.warns(UserWarning, match='"weight" was replaced by the nearest weight that LinearSVD can have'):
        layer.load_state_dict({"weight": torch.diag(torch.tensor([9.0, 1.0, 0.0])), "bias": torch.zeros(3)})
    expected = torch.tensor([2 - 1.5e-3, 1.0, 0.5 + 1.5e-3])
    torch.testing.assert_close(layer.svd.sigma.detach(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "dense", "warnings"),
    [
        (lambda: RNNSVD(3, 5, 2, "tanh"), lambda: nn.RNN(3, 5, 2), 2),
        (lambda: RNNSVD(3, 5, 1, "tanh", spectrum=spectrum.free()), lambda: nn.RNN(3, 5), 0),
        (lambda: GRUSVD(3, 5, spectrum=spectrum.around(1, 0.1)), lambda: nn.GRU(3, 5), 1),
        (lambda: LinearSVD(5, 4, rank=2), lambda: nn.Linear(5, 4), 1),
        (lambda: Conv2dSVD(3, 4, 2, spectrum=spectrum.around(1, 0.1)), lambda: nn.Conv2d(3, 4, 2), 1),
        (lambda: LinearSymmetric(4, spectrum=spectrum.between(5, 6)), lambda: symmetric_linear(4), 1),
        (lambda: LinearSymmetric(4), lambda: symmetric_linear(4), 0),
        (lambda: LinearSVD(5, 4, spectrum=spectrum.positive()), lambda: nn.Linear(5, 4), 0),
    ],
)
def test_a_checkpoint_that_a_layer_cannot_have_is_a_warning(
    layer: Callable[[], Any], dense: Callable[[], Any], warnings: int, recwarn: pytest.WarningsRecorder
) -> None:
    """One warning for each weight, with its name in the model; none for a layer that can have the weight."""
    model = nn.Sequential(layer())
    model.load_state_dict(nn.Sequential(dense()).state_dict())
    assert len(recwarn) == warnings
    for warning in recwarn:
        assert '"0.weight' in str(warning.message) and type(model[0]).__name__ in str(warning.message)
    recwarn.clear()
    model.load_state_dict(model.state_dict())
    assert not recwarn


def symmetric_linear(d: int) -> nn.Linear:
    linear = nn.Linear(d, d)
    linear.weight.data += linear.weight.data.mT.clone()
    return linear


def test_what_does_not_fit_is_said() -> None:
    layer = LinearSVD(4, 3)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    bias = torch.zeros(3)
    for state, message in (
        ({"weight": torch.randn(4, 3), "bias": bias}, r"`weight` should have shape \(3, 4\); got \(4, 3\)"),
        ({"weight": torch.full((3, 4), torch.nan), "bias": bias}, 'While converting "weight" to reflectors, sigma'),
        ({"weight": torch.randn(3, 4), "bias": bias, "scale": bias}, 'Unexpected key.*"scale"'),
        ({"weight": torch.randn(3, 4)}, 'Missing key.*"bias"'),
        ({"bias": bias}, 'Missing key.*"reflectors", "sigma"'),
        ({"weight": torch.randn(3, 4), **before}, 'Unexpected key.*"weight"'),
        ({"weight": None, "bias": bias}, 'Missing key.*"reflectors"'),
    ):
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(state)
    result = layer.load_state_dict({"weight": torch.eye(3, 4), "scale": bias}, strict=False)
    assert result.missing_keys == ["bias"] and result.unexpected_keys == ["scale"]
    torch.testing.assert_close(layer.weight.detach(), torch.eye(3, 4))


def test_a_pruned_layer_does_not_take_a_dense_checkpoint() -> None:
    layer = prune.random_unstructured(LinearSVD(4, 4), "sigma", amount=1)
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict(nn.Linear(4, 4).state_dict())


@of_every(CASES)
def test_a_shallow_copy_outlives_its_original(case: Case) -> None:
    """The hook that converts checkpoints knows its layer by a weak reference, and a shallow copy has one of its own."""
    layer, x = perturbed(case.make()), case.input()
    other, state = copy.copy(layer), perturbed(case.make()).state_dict()
    del layer
    other.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(output(copy.deepcopy(other), x), output(other, x))
        assert torch.equal(output(pickle.loads(pickle.dumps(other)), x), output(other, x))
