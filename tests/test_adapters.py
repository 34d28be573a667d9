"""fasth.adapters: values and gradients from the definition of each kind, and everything that is done with adapters."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fasth
from fasth import adapters
from fasth.adapters.turns import BlocksTurn, GeneralTurn, ReflectionsTurn

KINDS: dict[str, dict[str, Any]] = {
    "reflections": {"kind": "reflections", "r": 4},
    "an odd number of them": {"kind": "reflections", "r": 3, "side": "output"},
    "reflections, both": {"kind": "reflections", "r": 2, "side": "both"},
    "more than features": {"kind": "reflections", "r": 50},
    "orthogonal": {"kind": "orthogonal"},
    "orthogonal, both": {"kind": "orthogonal", "side": "both"},
    "orthogonal in blocks": {"kind": "orthogonal", "block_size": 2},
    "singular values": {"kind": "singular values"},
    "largest singular values": {"kind": "singular values", "r": 2},
    "thin SVD": {"kind": "thin SVD", "r": 3},
}
TURNING = [name for name, options in KINDS.items() if options["kind"] in ("reflections", "orthogonal")]
each_kind = pytest.mark.parametrize("kind", KINDS)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)).to(dtype)


def adapted(model: nn.Module, kind: str, **options: Any) -> nn.Module:
    return adapters.add(copy.deepcopy(model), **KINDS[kind], **options)


def trained(model: nn.Module, x: Tensor, steps: int = 3, lr: float = 0.02) -> nn.Module:
    """A few steps, so that no adapter is the identity any more."""
    optimizer = torch.optim.Adam(fasth.param_groups(model, lr=lr, optimizer=torch.optim.Adam))
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def dense_turn(turn: Any) -> Tensor:
    """Q, from its definition, one reflection at a time."""
    if isinstance(turn, ReflectionsTurn):
        Q = torch.eye(turn.features, dtype=turn.V.dtype)
        for v in turn.V:
            Q = Q @ (torch.eye(len(v), dtype=v.dtype) - 2 * torch.outer(v, v) / v.dot(v))
        return Q * turn.signs
    if isinstance(turn, GeneralTurn):
        return turn.layer.weight
    assert isinstance(turn, BlocksTurn)
    return torch.block_diag(*fasth.Orthogonal.of_stored(turn.reflectors).dense())


def definition(layer: adapters.Adapted, name: str = "default") -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of one adapted linear layer."""
    adapter: Any = layer.adapters[name]
    W, b = layer.base.weight, layer.base.bias
    if adapter.kind in ("reflections", "orthogonal"):
        if adapter.input is not None:
            W = W @ dense_turn(adapter.input)
        if adapter.output is not None:
            Q = dense_turn(adapter.output)
            W, b = Q @ W, None if b is None else Q @ b
        return W, b
    if adapter.kind == "thin SVD":
        svd = adapter.svd.svd
        return W + svd.U.dense()[:, : svd.sigma.numel()] * svd.sigma @ svd.V.dense()[:, : svd.sigma.numel()].mT, b
    U, sigma, Vh = torch.linalg.svd(W, full_matrices=False)
    r = len(adapter.delta)
    return torch.cat((U[:, :r] * (sigma[:r] + adapter.delta), U[:, r:] * sigma[r:]), 1) @ Vh, b


def run(weights: list[tuple[Tensor, Tensor | None]], x: Tensor) -> Tensor:
    for i, (W, b) in enumerate(weights):
        x = F.linear(torch.tanh(x) if i else x, W, b)
    return x


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@each_kind
def test_it_starts_as_the_model_and_trains_adapters_alone(kind: str) -> None:
    model, x = mlp(), torch.randn(5, 6, dtype=torch.float64)
    new = adapted(model, kind)
    assert torch.equal(new(x), model(x)), "the start is exact"
    before = {name: p.clone() for name, p in new.named_parameters()}
    trained(new, x)
    for name, p in new.named_parameters():
        assert p.requires_grad == (".adapters." in name), name
        assert torch.equal(p, before[name]) != p.requires_grad, name
    assert not torch.allclose(new(x), model(x))


@each_kind
def test_values_and_gradients_are_those_of_the_definition(kind: str) -> None:
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    model = trained(adapted(mlp(), kind), x.detach())
    layers: Any = [model[0], model[2]]
    y, expected = model(x), run([definition(layer) for layer in layers], x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    direction, wanted = torch.randn_like(y), [x, *trained_parameters(model)]
    found = torch.autograd.grad(y, wanted, direction)
    definition_gradients = torch.autograd.grad(expected, wanted, direction, materialize_grads=True)
    for ours, theirs, p in zip(found, definition_gradients, wanted, strict=True):
        if p.ndim >= 2 and p.shape[-1] == p.shape[-2]:  # the diagonal of compact reflectors holds signs
            ours, theirs = (g - torch.diag_embed(g.diagonal(dim1=-2, dim2=-1)) for g in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    for layer in layers:
        W, b = definition(layer)
        torch.testing.assert_close(layer.weight, W, rtol=1e-12, atol=1e-12)
        assert (b is None) == (layer.bias is None)
        if b is not None:
            torch.testing.assert_close(layer.bias, b, rtol=1e-12, atol=1e-12)


@each_kind
def test_merge_unmerge_remove(kind: str) -> None:
    plain, x = mlp(), torch.randn(5, 6, dtype=torch.float64)
    model = trained(adapted(plain, kind), x)
    expected, state = model(x), copy.deepcopy(model.state_dict())
    merged: Any = adapters.merge(model)
    torch.testing.assert_close(merged(x), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="merged into its weight: call `unmerge` first"):
        adapters.use(model)
    with pytest.raises(RuntimeError, match="`unmerge`"), adapters.disabled(model):
        pass
    adapters.unmerge(model)
    for name, t in model.state_dict().items():
        torch.testing.assert_close(t, state[name], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    dense: Any = adapters.remove(adapters.merge(model))
    assert [type(layer) for layer in dense] == [type(layer) for layer in plain]
    torch.testing.assert_close(dense(x), expected, rtol=1e-12, atol=1e-12)
    assert dense.state_dict().keys() == plain.state_dict().keys()


@each_kind
def test_disabled_and_removed_it_is_the_model_exactly(kind: str) -> None:
    plain, x = mlp(), torch.randn(5, 6, dtype=torch.float64)
    model = trained(adapted(plain, kind), x)
    adapted_output = model(x)
    with adapters.disabled(model):
        assert torch.equal(model(x), plain(x))
        with adapters.disabled(model):
            pass
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), adapted_output)
    adapters.use(model)
    assert torch.equal(model(x), plain(x)) and not trained_parameters(model)
    adapters.use(model, "default")
    assert torch.equal(model(x), adapted_output)
    assert torch.equal(adapters.remove(model)(x), plain(x))


@each_kind
def test_saved_and_loaded_into_a_fresh_base(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    plain, x = mlp(), torch.randn(5, 6, dtype=torch.float64)
    model = trained(adapted(plain, kind), x)
    adapters.save(model, tmp_path / "adapter.safetensors")
    fresh = adapters.load(copy.deepcopy(plain), tmp_path / "adapter.safetensors")
    assert torch.equal(fresh(x), model(x))
    assert [p.shape for p in trained_parameters(fresh)] == [p.shape for p in trained_parameters(model)]
    trained(fresh, x)  # it goes on


def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    plain, path, x = mlp(), tmp_path / "adapter.safetensors", torch.randn(5, 6, dtype=torch.float64)
    adapters.save(adapted(plain, "reflections"), path)
    other = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 4))
    with pytest.raises(ValueError, match="'default' does not fit the layer '0'"):
        adapters.load(other, path)
    assert isinstance(other[0], nn.Linear) and other[0].weight.requires_grad
    with pytest.raises(ValueError, match="should have a layer '2'"):
        adapters.load(nn.Sequential(nn.Linear(6, 8)), path)
    with pytest.raises(ValueError, match="should have no adapter called 'default' yet"):
        adapters.load(adapted(plain, "thin SVD"), path)
    with pytest.raises(ValueError, match="the file should have other; it has default"):
        adapters.load(mlp(), path, "other")
    with pytest.raises(ValueError, match="should have adapters called any"):
        adapters.save(plain, path)
    with pytest.raises(ValueError, match="should have adapters called other"):
        adapters.save(adapted(plain, "reflections"), path, "other")
    adapters.save(trained(adapted(plain, "singular values"), x), path)
    with pytest.raises(ValueError, match="for a weight with other singular values"):
        adapters.load(mlp(), path)
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=re.escape("should be a file of fasth.adapters.save")):
        adapters.load(mlp(), path)


def test_several_adapters_by_name(tmp_path: Path) -> None:
    """Adapters are applied in order: the weight with two is that of applying one after the other."""
    plain, x = mlp(), torch.randn(5, 6, dtype=torch.float64)
    model: Any = adapted(plain, "reflections, both", name="a", target="0")
    trained(model, x)
    only_a = model(x)
    adapters.add(model, "thin SVD", 2, name="b")
    assert model[0].active == ("b",) and torch.equal(model(x), plain(x))
    assert {name.split(".")[2] for name, p in model.named_parameters() if p.requires_grad} == {"b"}
    trained(model, x)
    assert torch.equal(adapters.use(model, "a")(x), only_a)
    for order in (("a", "b"), ("b", "a")):
        both: Any = adapters.use(copy.deepcopy(model), *order)
        assert both[0].active == order and both[2].active == ("b",)
        W = both[0].base.weight
        adapter_a, D = both[0].adapters["a"], both[0].adapters["b"].svd.weight
        if order == ("b", "a"):
            W = W + D
        W = dense_turn(adapter_a.output) @ W @ dense_turn(adapter_a.input)
        if order == ("a", "b"):
            W = W + D
        torch.testing.assert_close(both[0].weight, W, rtol=1e-12, atol=1e-12)
        y = both(x)
        torch.testing.assert_close(y, run([definition_of_layer(both[0]), definition_of_layer(both[2])], x))
        torch.testing.assert_close(adapters.merge(both)(x), y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(adapters.unmerge(both)(x), y, rtol=1e-12, atol=1e-12)
    adapters.use(model, "b")
    if pytest.importorskip("safetensors"):
        adapters.save(model, tmp_path / "two")
        loaded = adapters.load(copy.deepcopy(plain), tmp_path / "two")
        for names in (("a",), ("b",), ("a", "b")):
            assert torch.equal(adapters.use(loaded, *names)(x), adapters.use(model, *names)(x))
        one: Any = adapters.load(copy.deepcopy(plain), tmp_path / "two", "a")
        assert torch.equal(one(x), only_a) and isinstance(one[2], nn.Linear)
    adapters.remove(model, "b")
    assert list(model[0].adapters) == ["a"] and isinstance(model[2], nn.Linear)
    with pytest.raises(ValueError, match="should be one of 'a'; got 'b'"):
        adapters.use(model, "b")


def definition_of_layer(layer: Any) -> tuple[Tensor, Tensor | None]:
    return layer.weight, layer.bias


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1),
    "2d": lambda: nn.Conv2d(4, 6, (3, 2), padding=1, dilation=2, padding_mode="reflect"),
    "2d, 1×1": lambda: nn.Conv2d(4, 6, 1),
    "2d, same": lambda: nn.Conv2d(4, 6, 3, padding="same"),
    "3d": lambda: nn.Conv3d(4, 6, 2, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2),
}


@pytest.mark.parametrize("conv", CONVOLUTIONS)
@each_kind
def test_convolutions(conv: str, kind: str) -> None:
    layer = CONVOLUTIONS[conv]().double()
    x = torch.randn(2, 4, *(5,) * (layer.weight.ndim - 2), dtype=torch.float64)
    if kind in ("thin SVD", "singular values", "largest singular values") and (
        conv == "transposed" or (conv == "3d" and kind == "thin SVD")
    ):
        with pytest.raises(ValueError, match="cannot have this adapter"):
            adapted(layer, kind)
        return
    model: Any = adapted(layer, kind)
    torch.testing.assert_close(model(x), layer(x), rtol=1e-12, atol=1e-13)  # channels last: another order of sums
    trained(model, x)
    y = model(x)
    assert not torch.allclose(y, layer(x))
    torch.testing.assert_close(model(x[0]), y[0])  # without a batch
    dense = copy.deepcopy(layer)
    with torch.no_grad():
        dense.weight.copy_(model.weight)
        if dense.bias is not None:
            dense.bias.copy_(model.bias)
    torch.testing.assert_close(dense(x), y, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(adapters.merge(model)(x), y, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(adapters.unmerge(model).base.weight, layer.weight, rtol=1e-12, atol=1e-13)
    if kind in TURNING:
        turned, first = (t.movedim((0, 1), (-2, -1)) for t in (dense.weight, layer.weight))
        torch.testing.assert_close(torch.linalg.svdvals(turned.detach()), torch.linalg.svdvals(first.detach()))


def test_with_groups_it_is_called_and_not_merged() -> None:
    x = torch.randn(2, 4, 5, 5)
    model: Any = adapters.add(nn.Sequential(nn.Conv2d(4, 6, 3, groups=2)), "reflections", 2)
    trained(model, x)
    weight = model[0].base.weight.clone()
    with pytest.raises(ValueError, match="'0' cannot be merged: with groups its weight is several matrices"):
        adapters.merge(model)
    assert torch.equal(model[0].base.weight, weight)
    with pytest.raises(ValueError, match="with groups its weight is several matrices"):
        adapters.add(nn.Conv2d(4, 6, 3, groups=2), "thin SVD")


class Rounded(nn.Module):
    """A layer as quantization libraries have them: sizes, integers, and a scale."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax() / 7
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


@pytest.mark.parametrize("kind", ["reflections", "reflections, both", "orthogonal", "orthogonal in blocks", "thin SVD"])
def test_a_quantized_base_is_called_alone(kind: str) -> None:
    base = nn.Sequential(Rounded(nn.Linear(6, 8)), nn.Tanh())
    x = torch.randn(5, 6)
    model: Any = adapted(base, kind)
    torch.testing.assert_close(model(x), base(x), rtol=0, atol=0)
    trained(model, x)
    assert not torch.allclose(model(x), base(x), atol=1e-4)
    row = adapters.report(model)[0]
    assert row.change is None and (row.angle is None) == (kind == "thin SVD")
    with pytest.raises(ValueError, match="'0' cannot be merged: Rounded has no dense weight"):
        adapters.merge(model)
    with pytest.raises(AttributeError, match="Rounded has no dense weight"):
        _ = model[0].weight
    with pytest.raises(ValueError, match="Rounded has no dense weight"):
        adapters.add(copy.deepcopy(base), "singular values")


@pytest.mark.filterwarnings("ignore:.*quantize.* are deprecated", "ignore:.*torch.ao.quantization is deprecated")
def test_dynamically_quantized_layers_of_torch() -> None:
    from torch.ao.nn.quantized.dynamic import Linear

    base: Any = Linear(6, 8)
    x = torch.randn(5, 6)
    model: Any = adapters.add(nn.Sequential(base), "reflections", 2, side="output")
    assert model[0].adapters["default"].output.features == 8
    torch.testing.assert_close(model(x), base(x))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@each_kind
def test_half_precision_bases(kind: str, half: torch.dtype) -> None:
    """Adapters are float32, Q is orthogonal as float32 is, and what comes out is rounded to the base's dtype."""
    plain, x = mlp(half), torch.randn(5, 6).to(half)
    model: Any = adapted(plain, kind)
    assert {p.dtype for p in trained_parameters(model)} == {torch.float32}
    assert torch.equal(model(x), plain(x))
    trained(model, x)
    assert model(x).dtype == half
    wide = copy.deepcopy(model).float()
    torch.testing.assert_close(model(x).float(), wide(x.float()), rtol=0.02, atol=0.02)
    adapter = model[0].adapters["default"]
    if kind in TURNING:
        for turn in (adapter.input, adapter.output):
            if turn is not None:
                eye = torch.eye(turn.features)
                assert (turn(eye) @ turn(eye).mT - eye).abs().max() < 1e-6
                half_output = turn(x.new_ones(1, turn.features))
                assert half_output.dtype == half
                torch.testing.assert_close(
                    half_output.float().norm(),
                    turn.features**0.5 + 0 * x[0, 0].float(),
                    rtol=4 * torch.finfo(half).eps,
                    atol=0,
                )
    merged = adapters.merge(copy.deepcopy(model))
    torch.testing.assert_close(merged(x), model(x), rtol=0.02, atol=0.02)
    as_half: Any = model.to(half)  # the parameters of the adapters, too
    assert as_half(x).dtype == half and trained_parameters(as_half)[0].dtype == half


@each_kind
def test_autocast_keeps_the_dtype_of_what_comes_out_and_the_orthogonality(kind: str) -> None:
    plain, x = mlp(torch.float32), torch.randn(5, 6)
    model = trained(adapted(plain, kind), x)
    exact = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained_parameters(model))


@each_kind
def test_activation_checkpointing(kind: str) -> None:
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    model = trained(adapted(mlp(), kind), x.detach())
    wanted = [x, *trained_parameters(model)]
    expected = torch.autograd.grad(model(x).square().sum(), wanted)
    found = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).square().sum(), wanted)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["reflections, both", "orthogonal in blocks", "singular values", "thin SVD"])
def test_compiled(kind: str) -> None:
    x = torch.randn(5, 6, requires_grad=True)
    model = trained(adapted(mlp(torch.float32), kind), x.detach())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    wanted = [x, *trained_parameters(model)]
    expected, found = model(x), compiled(x)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with adapters.disabled(model):
        torch.testing.assert_close(compiled(x), model(x))


@each_kind
def test_copies_pickles_and_state_dicts(kind: str) -> None:
    plain, x = mlp(), torch.randn(5, 6, dtype=torch.float64)
    model = trained(adapted(plain, kind), x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = adapted(plain, kind)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), model(x))
    # The base takes the state dict of a plain model.
    second = mlp()
    other.load_state_dict(second.state_dict(), strict=False)
    adapters.use(other)
    assert torch.equal(other(x), second(x))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (None, ["blocks.0.q", "blocks.0.v", "blocks.1.q", "blocks.1.v", "head"]),
        ("q", ["blocks.0.q", "blocks.1.q"]),
        ("1.q", ["blocks.1.q"]),
        ("blocks.1.q", ["blocks.1.q"]),
        ("blocks.*.v", ["blocks.0.v", "blocks.1.v"]),
        (re.compile(r"blocks\.\d\.[qv]"), ["blocks.0.q", "blocks.0.v", "blocks.1.q", "blocks.1.v"]),
        (("q", "head"), ["blocks.0.q", "blocks.1.q", "head"]),
        (nn.Linear, ["blocks.0.q", "blocks.0.v", "blocks.1.q", "blocks.1.v", "head"]),
        (lambda name, module: module.out_features == 4 if isinstance(module, nn.Linear) else True, ["head"]),
    ],
)
def test_targets(target: Any, expected: list[str]) -> None:
    block = lambda: nn.ModuleDict({"q": nn.Linear(6, 6), "v": nn.Linear(6, 6), "norm": nn.LayerNorm(6)})  # noqa: E731
    model = nn.ModuleDict({"blocks": nn.ModuleList([block(), block()]), "head": nn.Linear(6, 4)})
    adapters.add(model, "reflections", 2, target)
    assert [row.layer for row in adapters.report(model)] == expected


def test_what_a_target_may_not_be() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "q": nn.Linear(4, 4)})
    with pytest.raises(ValueError, match="got 'k', and those of ModuleDict are q"):
        adapters.add(model, target="k")
    with pytest.raises(ValueError, match="`target` names 'norm', and a LayerNorm cannot be adapted"):
        adapters.add(model, target="norm")
    with pytest.raises(TypeError, match=r"`target` should be a name, .*; got int"):
        adapters.add(model, target=3)
    with pytest.raises(TypeError, match=r"`model` should be a torch\.nn\.Module; got int"):
        adapters.add(3)  # type: ignore[arg-type]
    assert isinstance(model["q"], nn.Linear) and model["q"].weight.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kind": "lora"},
            "`kind` should be one of 'reflections', 'orthogonal', 'singular values', 'thin SVD'; got 'lora'",
        ),
        ({"r": 0}, "`r` should be an int of at least 1; got 0"),
        ({"kind": "orthogonal", "r": 2}, "'orthogonal' has no `r`"),
        ({"kind": "thin SVD", "side": "both"}, "'thin SVD' has no `side`"),
        ({"side": "left"}, "`side` should be one of 'input', 'output', 'both'; got 'left'"),
        ({"kind": "orthogonal", "block_size": 4}, "`block_size` should divide the 6 features; got 4"),
        ({"kind": "orthogonal", "block_size": 0}, "`block_size` should be an int of at least 1, or None; got 0"),
        ({"name": "a.b"}, "`name` should be a string without dots"),
        ({"name": "keys"}, "no method of nn.ModuleDict; got 'keys'"),
    ],
)
def test_errors_leave_the_model_as_it_was(options: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=re.escape(message)):
        adapters.add(model, **options)
    assert isinstance(model[0], nn.Linear) and model[0].weight.requires_grad
    with pytest.raises(ValueError, match="'0' should have no adapter called 'default' yet"):
        adapters.add(adapters.add(model))


def test_modules_and_weights_that_are_shared() -> None:
    layer = nn.Linear(6, 6)
    model: Any = adapters.add(nn.Sequential(layer, nn.Tanh(), layer), "reflections", 2)
    assert model[0] is model[2] and len(adapters.report(model)) == 1
    x = torch.randn(5, 6)
    trained(model, x)
    y = model(x)
    torch.testing.assert_close(adapters.merge(model)(x), y)
    tied = nn.ModuleDict({"words": nn.Embedding(9, 6), "head": nn.Linear(6, 9, bias=False)})
    tied["head"].weight = tied["words"].weight
    adapters.add(tied, "reflections", 2, "head")
    with pytest.raises(ValueError, match="'head' cannot be merged: its weight is also that of words"):
        adapters.merge(tied)


def test_modules_that_read_the_weight_in_place_of_calling_the_layer() -> None:
    """``nn.MultiheadAttention`` reads the weight of its output projection, a transformer's fast path all weights."""
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    model: Any = adapters.add(copy.deepcopy(attention), "reflections", 3, side="both", target=nn.Linear)
    torch.testing.assert_close(model(x), attention(x))
    trained(model, x)
    y = model(x)
    assert not torch.allclose(y, attention(x), atol=1e-3)
    torch.testing.assert_close(adapters.remove(adapters.merge(copy.deepcopy(model)))(x), y)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), y)


def test_attributes_are_those_of_the_base() -> None:
    model: Any = adapters.add(nn.Conv2d(4, 6, 3, stride=2), "reflections", 2)
    assert (model.stride, model.in_channels, model.kernel_size) == ((2, 2), 4, (3, 3))
    with pytest.raises(AttributeError, match="'Conv2d' object has no attribute 'nothing'"):
        _ = model.nothing


def test_param_groups_know_adapters() -> None:
    model = mlp()
    adapters.add(model, "reflections", 2, "0", name="a")
    adapters.add(model, "thin SVD", 2, "2", name="b")
    adapters.add(model, "singular values", target="0", name="c")
    names = {id(p): name for name, p in model.named_parameters()}
    kinds = {
        names[id(p)]: group["name"]
        for group in fasth.param_groups(model, lr=1e-3, weight_decay=0.1)
        for p in group["params"]
    }
    assert kinds["0.adapters.a.input.V"] == "reflectors" == kinds["2.adapters.b.svd.reflectors_U"]
    assert kinds["2.adapters.b.svd.sigma"] == "sigma" == kinds["0.adapters.c.delta"]
    decay = {group["name"]: group["weight_decay"] for group in fasth.param_groups(model, lr=1e-3, weight_decay=0.1)}
    assert decay["reflectors"] == 0 < decay["sigma"]
    assert set(fasth.spectra(model)) == {"0.adapters.a.input", "0.adapters.c", "2.adapters.b.svd"}
    assert fasth.nuclear_norm(model) == 0


def test_the_rates_of_adapters_are_near_that_of_lora() -> None:
    """A rotation of more features has a lower rate, as it turns further by as long a step."""

    def multiple(kind: str, d: int, **options: Any) -> float:
        model = adapters.add(nn.Linear(d, 2), kind, **options)
        groups = fasth.param_groups(model, lr=1e-3)
        return next(group["lr"] for group in groups if group["name"] == "reflectors") / 1e-3

    assert multiple("reflections", 64) == multiple("reflections", 512) == pytest.approx(0.85, abs=0.01)
    assert multiple("orthogonal", 64) == pytest.approx(3.5 / 8)
    assert multiple("orthogonal", 512) == pytest.approx(3.5 / 512**0.5)
    assert multiple("orthogonal", 64, block_size=16) == pytest.approx(3.5 / 4)


def test_conversions_leave_adapted_layers_alone() -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    model = trained(adapted(mlp(), "thin SVD", target="0"), x)
    report: list[Any] = []
    svd: Any = fasth.to_svd(model, report=report)
    assert isinstance(svd[0], adapters.Adapted) and isinstance(svd[2], fasth.LinearSVD)
    assert all("Adapted" in c.reason for c in report if c.name.startswith("0.") and c.before == "Linear")
    torch.testing.assert_close(svd(x), model(x))
    torch.testing.assert_close(fasth.to_dense(model)(x), model(x))


# The report.


@pytest.mark.parametrize("angle", [1e-6, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("kind", ["reflections", "orthogonal", "orthogonal in blocks"])
def test_the_report_knows_an_angle(kind: str, angle: float) -> None:
    model: Any = adapted(nn.Linear(6, 8).double(), kind)
    turn = model.adapters["default"].input
    cos, sin = torch.tensor(angle, dtype=torch.float64).cos(), torch.tensor(angle, dtype=torch.float64).sin()
    rotation = torch.stack((torch.stack((cos, -sin)), torch.stack((sin, cos))))
    with torch.no_grad():
        if kind == "reflections":  # two reflections turn by twice the angle between them
            half = torch.tensor(angle / 2, dtype=torch.float64)
            turn.V.zero_()
            turn.V[:2, :2] = torch.tensor([[1.0, 0.0], [half.cos(), half.sin()]])
            turn.V[2:, 3] = 1
            turn.signs.fill_(1)
        elif kind == "orthogonal":
            turn.layer.set_weight_(torch.block_diag(rotation, torch.eye(4, dtype=torch.float64)))
        else:
            turn.reflectors[0] = fasth.Orthogonal.from_dense(rotation).V.triu(1) + torch.diag(
                fasth.Orthogonal.from_dense(rotation).signs
            )
    row = adapters.report(model)[0]
    assert row.angle == pytest.approx(angle * 57.29577951308232, rel=1e-4, abs=2e-6)
    W = model.base.weight
    assert row.change == pytest.approx(((model.weight - W).norm() / W.norm()).item(), rel=1e-3, abs=1e-6)


def test_the_report_is_a_table() -> None:
    model = trained(adapted(mlp(), "reflections", target="0"), torch.randn(5, 6, dtype=torch.float64))
    adapters.add(model, "thin SVD", 2, name="second")
    lines = repr(adapters.report(model)).splitlines()
    assert lines[0].split("  ")[0] == "layer" and len(lines) == 4
    assert re.fullmatch(r"0 +default +reflections +inactive +24 +\S+ +\S+", lines[1])
    assert re.fullmatch(r"0 +second +thin SVD +active +30 +0", lines[2])
    adapters.merge(model)
    assert [row.state for row in adapters.report(model)] == ["inactive", "merged", "merged"]
    assert len(adapters.report(mlp())) == 0


# Merging and starting anew.


@each_kind
def test_a_restart_computes_the_same_and_trains_on(kind: str) -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    model: Any = adapted(mlp(), kind)
    optimizer = torch.optim.Adam(trained_parameters(model), lr=0.01)
    for _ in range(3):
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        y = model(x)
        adapters.merge_and_restart(model, optimizer)
        torch.testing.assert_close(model(x), y, rtol=1e-12, atol=1e-12)
        assert not optimizer.state
        with adapters.disabled(model):
            torch.testing.assert_close(model(x), y, rtol=1e-12, atol=1e-12)
        optimizer.zero_grad()
    assert all(p.requires_grad for p in trained_parameters(model)) and model[0].active == ("default",)


@pytest.mark.parametrize("kind", ["reflections", "reflections, both"])
def test_restarts_keep_the_singular_values(kind: str) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(12, 8)
    first = torch.linalg.svdvals(layer.weight.detach().double())
    model: Any = adapted(layer, kind)
    for _ in range(200):
        with torch.no_grad():
            for p in trained_parameters(model):
                p.add_(torch.randn_like(p), alpha=0.1)
        adapters.merge_and_restart(model)
    assert (model.base.weight - layer.weight).norm() > 0.5 * layer.weight.norm()
    found = torch.linalg.svdvals(model.base.weight.detach().double())
    assert ((found - first).abs() / first).max() < 2e-6


def test_the_state_of_the_optimizer_is_that_of_the_adapters() -> None:
    model = adapted(mlp(torch.float32), "reflections, both")
    optimizer = torch.optim.Adam(trained_parameters(model), lr=0.01)
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()
    numbers = sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.ndim)
    assert numbers == 2 * 2 * (6 + 8 + 8 + 4)  # two moments, two reflections, of the sizes of both sides


# Cost.


@pytest.mark.parametrize("r", [8, 40, 64])
@pytest.mark.parametrize("rows", [32, 256, 1024])
def test_saved_memory_is_two_copies_of_the_input_at_most(r: int, rows: int) -> None:
    """LoRA saves the input and r numbers a row; one copy more, and what is as large as the reflectors."""
    layer: Any = adapters.add(nn.Linear(768, 512), "reflections", r)
    x, kept = torch.randn(rows, 768, requires_grad=True), {}
    own = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    numbers = sum(t.untyped_storage().nbytes() // 4 for t in kept.values())
    assert 2 * x.numel() <= numbers <= 2 * x.numel() + 2 * r * (rows + 768)
    del y


@pytest.mark.parametrize("rows", [64, 128, 1024, 8192])
def test_a_gpu_does_not_form_few_reflections(rows: int) -> None:
    from fasth.reflections.planner import counting_kernels
    from fasth.tools.reproduce.counts import observed

    layer: Any = adapters.add(nn.Linear(2048, 2048, device="meta"), "reflections", 8)
    x = torch.empty(rows, 2048, device="meta", requires_grad=True)
    with counting_kernels(), observed() as forward:
        y = layer(x)
    with counting_kernels(), observed() as backward:
        torch.autograd.grad(y, [x, *trained_parameters(layer)], torch.empty_like(y))
    assert "eye" not in forward and len(forward) <= 4 and len(backward) <= 4


# Several processes.


def adapted_network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    adapters.add(model, "reflections", 3, "0", side="both")
    adapters.add(model, "orthogonal", target="2", block_size=4)
    return adapters.add(model, "thin SVD", 2, "4")


def losses(wrapper: str, size: int) -> list[float]:
    """Losses of some steps of SGD, which follows the gradients, on a batch that the processes share."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    adapters_model: Any = adapted_network()
    for name in ("0", "2", "4"):  # each of its own kind: all are called "default"
        assert adapters_model.get_submodule(name).active == ("default",)
    model: Any = adapters_model
    if wrapper == "ddp":
        model = DistributedDataParallel(adapters_model)
    elif wrapper == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        for layer in (0, 2, 4):
            fully_shard(adapters_model[layer], mesh=mesh)
        fully_shard(adapters_model, mesh=mesh)
    optimizer = torch.optim.SGD(fasth.param_groups(model, lr=0.1, optimizer=torch.optim.SGD))
    rank = dist.get_rank() if size > 1 else 0
    found = []
    for _ in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        part = x.chunk(size)[rank]
        optimizer.zero_grad()
        loss = (model(part) - 1).square().mean()
        loss.backward()
        optimizer.step()
        if size > 1:
            loss = loss.detach()
            dist.all_reduce(loss)
        found.append(loss.item() / size)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("torch without torch.distributed")
    from ranks import Ranks

    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_two_processes_compute_what_one_does(wrapper: str, ranks: Any) -> None:
    expected = losses("", 1)
    assert expected[-1] < expected[0]
    for found in ranks(losses, wrapper, 2):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)
