"""fasth.peft: PEFT's own forward, method for method, in value and gradient, with everything else that is PEFT's."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import script
from torch import Tensor, nn
from zoo.libraries import define_operators_of_torchvision, missing

import fasth

if missing(("peft",)):
    pytest.skip("peft is not installed; `make zoo` installs it", allow_module_level=True)

define_operators_of_torchvision()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    from peft.tuners.hra import layer as hra
    from peft.tuners.oft import layer as oft

if peft.__version__ not in fasth.peft.VERSIONS:
    pytest.skip(f"fasth.peft is for PEFT {fasth.peft.VERSIONS}; got {peft.__version__}", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def peft_as_it_was() -> Iterator[None]:
    before = [vars(hra.HRALinear).copy(), vars(hra.HRAConv2d).copy(), vars(oft.OFTRotationModule).copy()]
    yield
    fasth.peft.disable()
    assert before == [vars(hra.HRALinear).copy(), vars(hra.HRAConv2d).copy(), vars(oft.OFTRotationModule).copy()]


def linear(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6, bias=False)).to(dtype)


CONVOLUTIONS = {
    "3x3": nn.Conv2d(4, 6, 3, padding=1),
    "3x3, stride": nn.Conv2d(4, 6, 3, stride=2, bias=False),
    "1x1": nn.Conv2d(4, 6, 1),
    "1x1, stride": nn.Conv2d(4, 6, 1, stride=2),
}
MODELS = {"linear": linear(), **{name: nn.Sequential(conv).double() for name, conv in CONVOLUTIONS.items()}}
each_model = pytest.mark.parametrize("kind", MODELS)


def sample(kind: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*((5, 6) if kind == "linear" else (2, 4, 5, 5)), dtype=dtype)


def adapted(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    targets = ["0", "2"] if kind == "linear" else ["0"]
    config = peft.HRAConfig(target_modules=targets, **{"init_weights": False, "r": 4} | options)
    autocast = options.pop("autocast_adapter_dtype", False)
    model = peft.get_peft_model(copy.deepcopy(MODELS[kind]).to(dtype), config, autocast_adapter_dtype=autocast)
    for name, p in model.named_parameters():
        if "hra_u" in name:
            p.data = p.data.to(dtype)
    return model


def add(model: Any, name: str, **options: Any) -> Any:
    targets = [*model.peft_config["default"].target_modules]
    model.add_adapter(name, peft.HRAConfig(target_modules=targets, **{"init_weights": False, "r": 2} | options))
    return model.to(next(model.parameters()).dtype)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def values_and_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    torch.manual_seed(5)
    y = model(x)
    return [
        y,
        *torch.autograd.grad(y, [x, *trained(model).values()], torch.randn(y.shape, dtype=y.dtype)),
    ]  # not randn_like: layouts differ


def compare(model: nn.Module, x: Tensor, **tolerance: float) -> None:
    expected = values_and_gradients(model, x)
    with fasth.peft.enable():
        found = values_and_gradients(model, x)
    assert len(found) > 2
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@each_model
@pytest.mark.parametrize(
    "options",
    [{}, {"apply_GS": True}, {"r": 5}, {"bias": "hra_only"}, {"init_weights": True}],
    ids=["default", "apply_GS", "odd", "bias", "identity"],
)
def test_values_and_gradients_are_those_of_peft(kind: str, options: dict[str, Any]) -> None:
    compare(adapted(kind, **options), sample(kind), rtol=1e-9, atol=1e-10)


@each_model
def test_several_active_adapters(kind: str) -> None:
    """The order matters."""
    model = add(add(adapted(kind), "second", apply_GS=True), "third")
    for names in (["default", "second", "third"], ["third", "default"], ["second"]):
        model.base_model.set_adapter(names)
        compare(model, sample(kind), rtol=1e-9, atol=1e-10)


@each_model
@pytest.mark.parametrize("apply_GS", [False, True])
def test_delta_weights(kind: str, apply_GS: bool) -> None:
    layer = adapted(kind, apply_GS=apply_GS).base_model.model[0]
    for reverse in (False, True):
        expected = layer.get_delta_weight("default", reverse=reverse)
        with fasth.peft.enable():
            found = layer.get_delta_weight("default", reverse=reverse)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@each_model
@pytest.mark.parametrize("safe", [False, True])
def test_merged_unmerged_and_disabled(kind: str, safe: bool) -> None:
    model, x = add(adapted(kind), "second"), sample(kind)
    model.base_model.set_adapter(["default", "second"])
    plain, expected = MODELS[kind](x), model(x)
    with fasth.peft.enable():
        with model.disable_adapter():
            torch.testing.assert_close(model(x), plain)
        model.merge_adapter(safe_merge=safe)
        torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-11)
        with model.disable_adapter():
            torch.testing.assert_close(model(x), plain, rtol=1e-10, atol=1e-11)
        model.unmerge_adapter()
        torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-11)
    with fasth.peft.enable():
        whole = model.merge_and_unload(safe_merge=safe)
    torch.testing.assert_close(whole(x), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [True, False], ids=["float32 adapters", "half adapters"])
@each_model
def test_half_precision(kind: str, half: torch.dtype, wide: bool) -> None:
    """The error against float64 is PEFT's own, up to one more rounding of the activations."""
    model, x = adapted(kind, half), sample(kind, half)
    if wide:
        for p in trained(model).values():
            p.data = p.data.float()
    exact = [t.detach() for t in values_and_gradients(copy.deepcopy(model).double(), x.double())]
    theirs = values_and_gradients(model, x)
    with fasth.peft.enable():
        ours = values_and_gradients(model, x)
    for found, own, expected in zip(ours, theirs, exact, strict=True):
        assert found.dtype == own.dtype
        size = expected.abs().max()
        error, peft_error = ((t.double() - expected).abs().max() / size for t in (found, own))
        assert error < 2 * peft_error + 4 * torch.finfo(half).eps


@pytest.mark.parametrize("kind", ["linear", "3x3", "1x1"])
def test_autocast(kind: str) -> None:
    model, x = adapted(kind, torch.float32), sample(kind, torch.float32)
    exact = model(x)
    for context in (fasth.peft.enable(), None):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)
        assert y.dtype == x.dtype
        if context is not None:
            context.disable()


def test_the_base_is_only_called() -> None:
    """The base layer's hooks run, and so does its class's own forward."""
    model, x = adapted("linear"), sample("linear")
    calls: list[int] = []
    base = model.base_model.model[0].base_layer
    base.register_forward_hook(lambda *_: calls.append(1))
    expected = model(x)
    assert not calls
    with fasth.peft.enable():
        torch.testing.assert_close(model(x), expected)
    assert calls == [1]


@pytest.mark.parametrize(
    "options",
    [
        {"padding": (1, 0), "stride": (2, 1), "dilation": 2, "padding_mode": "circular"},
        {"padding": "same", "dilation": (1, 2), "padding_mode": "reflect"},
        {"padding": "valid", "padding_mode": "replicate"},
        {"padding": "same"},
    ],
)
def test_a_convolution_has_all_options_of_its_base_as_after_merge(options: dict[str, Any]) -> None:
    """PEFT's forward has one padding and one stride for both directions, and no dilation."""
    conv = nn.Sequential(nn.Conv2d(4, 6, 3, **options)).double()  # type: ignore[arg-type]
    config = peft.HRAConfig(target_modules=["0"], r=4, init_weights=False)
    model, x = (
        peft.get_peft_model(conv, config, autocast_adapter_dtype=False).double(),
        torch.randn(2, 4, 9, 9).double(),
    )
    merged = copy.deepcopy(model).merge_and_unload()
    with fasth.peft.enable():
        torch.testing.assert_close(model(x), merged(x), rtol=1e-10, atol=1e-11)


def test_a_kernel_that_is_not_square_is_refused() -> None:
    conv = nn.Sequential(nn.Conv2d(4, 6, (3, 2)))
    model = peft.get_peft_model(conv, peft.HRAConfig(target_modules=["0"], r=4))
    with fasth.peft.enable(), pytest.raises(ValueError, match=r"HRA needs a square kernel; got \(3, 2\)"):
        model(torch.randn(1, 4, 5, 5))


def test_checkpoints_and_configurations_are_those_of_peft(tmp_path: Path) -> None:
    model, x = adapted("linear"), sample("linear")
    expected = model(x)
    with fasth.peft.enable():
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(MODELS["linear"]), tmp_path, autocast_adapter_dtype=False)
        torch.testing.assert_close(loaded.double()(x), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(loaded(x), expected, rtol=1e-6, atol=1e-7)


def test_it_compiles() -> None:
    model, x = adapted("linear", torch.float32), sample("linear", torch.float32)
    with fasth.peft.enable():
        compiled: Any = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(compiled(x), model(x))


def test_contexts_nest_and_end() -> None:
    originals = hra.HRALinear.forward, hra.HRAConv2d.forward, oft.OFTRotationModule._cayley_batch
    first = fasth.peft.enable()
    assert hra.HRALinear.forward is not originals[0] and oft.OFTRotationModule._cayley_batch is originals[2]
    with fasth.peft.enable(oft="exact"):
        assert oft.OFTRotationModule._cayley_batch is not originals[2]
    assert hra.HRALinear.forward is not originals[0] and oft.OFTRotationModule._cayley_batch is originals[2]
    first.disable()
    first.disable()
    assert (hra.HRALinear.forward, hra.HRAConv2d.forward, oft.OFTRotationModule._cayley_batch) == originals
    with pytest.raises(ZeroDivisionError), fasth.peft.enable():
        _ = 1 / 0
    assert hra.HRALinear.forward is originals[0]


def test_other_versions_and_other_patches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="`oft` should be \"exact\" or None; got 'fast'"):
        fasth.peft.enable(oft="fast")
    with monkeypatch.context() as patch:
        patch.setattr(peft, "__version__", "0.1.0")
        with pytest.raises(RuntimeError, match=r"tested with PEFT 0\.21\.2; got 0\.1\.0"):
            fasth.peft.enable()
    with monkeypatch.context() as patch:
        patch.setattr(hra.HRAConv2d, "forward", lambda self, x: x)
        with pytest.raises(RuntimeError, match=r"HRAConv2d\.forward should be PEFT's own"):
            fasth.peft.enable()
    assert hra.HRALinear.forward.__module__ == hra.__name__
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)
        with pytest.raises(ImportError, match="pip install peft"):
            fasth.peft.enable()


def test_importing_fasth_does_not_import_peft() -> None:
    assert script("import fasth, sys; fasth.peft.enable; print('peft' in sys.modules)") == "False\n"


# OFT.


def rotation(angle: float, **options: Any) -> tuple[Any, Tensor]:
    """An OFT layer whose blocks turn by this angle, their skew matrices having tan(angle / 2), and the rotation."""
    config = peft.OFTConfig(target_modules=["0"], oft_block_size=2, r=0, **options)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 3).double()), config, autocast_adapter_dtype=False).double()
    theta = torch.tensor(angle, dtype=torch.float64)
    layer: Any = model.base_model.model[0]
    layer.oft_R["default"].weight.data.fill_(torch.tan(theta / 2))
    exact = torch.stack((torch.stack((theta.cos(), theta.sin())), torch.stack((-theta.sin(), theta.cos()))))
    return model, torch.block_diag(exact, exact)


@pytest.mark.parametrize("degrees", [1, 20, 53, 77, 90, 150])
def test_oft_is_a_rotation_and_merges(degrees: float) -> None:
    model, exact = rotation(degrees / 57.29577951308232)
    layer = model.base_model.model[0]
    theta = torch.tensor(degrees / 57.29577951308232 / 2, dtype=torch.float64).tan()
    x = torch.randn(5, 4, dtype=torch.float64)
    series = layer.get_delta_weight("default")
    found = torch.linalg.svdvals(series)
    torch.testing.assert_close(found, (1 - theta**4).abs().expand(4))  # what is wrong with it
    with fasth.peft.enable(oft="exact"):
        R = layer.get_delta_weight("default")
        torch.testing.assert_close(R, exact, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(R @ R.mT, torch.eye(4, dtype=torch.float64))
        y = model(x)
        torch.testing.assert_close(y, nn.functional.linear(x @ exact, layer.base_layer.weight, layer.base_layer.bias))
        y.sum().backward()
        assert layer.oft_R["default"].weight.grad.isfinite().all()
        model.merge_adapter()
        torch.testing.assert_close(model(x), y, rtol=1e-10, atol=1e-11)
        model.unmerge_adapter()  # which PEFT computes in float32
        torch.testing.assert_close(model(x), y, rtol=1e-5, atol=1e-5)


def test_oft_without_the_series_is_that_of_peft() -> None:
    """PEFT's OFT turns in the opposite direction."""
    model, exact = rotation(0.3, use_cayley_neumann=False)
    layer, x = model.base_model.model[0], torch.randn(5, 4, dtype=torch.float64)
    expected = model(x)
    torch.testing.assert_close(layer.get_delta_weight("default"), exact.mT)
    with fasth.peft.enable(oft="exact"):
        torch.testing.assert_close(model(x), expected)
    assert oft.OFTRotationModule._cayley_batch.__module__ == oft.__name__


@pytest.mark.parametrize("options", [{}, {"block_share": True}, {"coft": True, "eps": 0.01}])
@pytest.mark.parametrize("conv", [False, True])
def test_oft_near_the_identity_is_that_of_peft(options: dict[str, Any], conv: bool) -> None:
    base = nn.Sequential(nn.Conv2d(4, 6, 3) if conv else nn.Linear(8, 6)).double()
    config = peft.OFTConfig(target_modules=["0"], oft_block_size=4, r=0, **options)
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False).double()
    layer: Any = model.base_model.model[0]
    torch.nn.init.normal_(layer.oft_R["default"].weight, std=1e-4)
    x = torch.randn(2, 4, 6, 6).double() if conv else torch.randn(5, 8).double()
    expected = values_and_gradients(model, x)
    with fasth.peft.enable(oft="exact"):
        for ours, theirs in zip(values_and_gradients(model, x), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
