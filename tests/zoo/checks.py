"""Checks of every architecture. A check raises an error where it fails, and ``Skip`` where the plain model
fails, too."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

import fasth
from fasth.convert import Conversion
from fasth.convert.replace import is_weight_parameter
from fasth.nn.factored import Factored
from fasth.nn.held_weight import named_held_weights
from zoo.models import Architecture

TOLERANCE = 1e-9  # relative to the largest entry; some models compute norms in float32 even in float64
MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Bilinear, nn.RNNBase)
# Compiled by Inductor, which takes longer; the others by the same tracer and AOTAutograd, without code generation.
BY_INDUCTOR = {"transformers/llama", "timm/vit", "timm/byobnet, groups", "torchvision/densenet"}


class Skip(Exception):
    """The plain model cannot do it either."""


class Specimen:
    """An architecture with random weights, what it computes, and the same with SVDs; all in float64."""

    def __init__(self, architecture: Architecture) -> None:
        torch.manual_seed(0)
        self.architecture = architecture
        self.plain = architecture.make().double().eval()
        randomise(self.plain)
        self.x = architecture.inputs()
        with torch.no_grad():
            self.expected = output(self.plain, self.x)
        self.report: list[Conversion] = []
        self.svd = fasth.to_svd(self.plain, report=self.report)

    def assert_same(
        self, actual: Tensor, expected: Tensor, what: str = "the output", tolerance: float = TOLERANCE
    ) -> None:
        scale = expected.abs().max().item()
        off = (actual - expected).abs().max().item()
        assert off <= tolerance * scale, f"{what} is off by {off:.1e}, of at most {scale:.1e}"

    @torch.no_grad()
    def assert_computes_the_same(self, model: nn.Module) -> None:
        self.assert_same(output(model, self.x), self.expected)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights with which every layer matters: many start at zero, or so small that only shortcuts do."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            elif "bias" in name:
                parameter.normal_(std=0.1)
            else:
                parameter.uniform_(0.5, 1.5)


def output(model: nn.Module, x: dict[str, Tensor]) -> Tensor:
    out: Any = model(**x)
    found: Tensor = out if isinstance(out, Tensor) else out[0]
    return found


def in_dtype(x: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in x.items()}


def others(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a conversion leaves as they are, by name."""
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if not (isinstance(module, Factored) and is_weight_parameter(name))
    }


def gradients(
    model: nn.Module, x: dict[str, Tensor], names: list[str], call: Any = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output in training mode, and the gradients of the named parameters; dropout is the same in every call.

    ``call`` is called in the place of the model: the compiled one.
    """
    torch.manual_seed(1)
    model.train()
    out = output(model if call is None else call, x)
    torch.manual_seed(2)
    held = others(model)
    wanted = {name: held[name] for name in names if held[name].requires_grad}
    found = torch.autograd.grad((out * torch.randn_like(out)).sum(), [*wanted.values()], allow_unused=True)
    return out, {name: g for name, g in zip(wanted, found, strict=True) if g is not None}


def conversion(s: Specimen) -> None:
    """The converted model computes the same."""
    assert any(c.after for c in s.report), "nothing was converted"
    s.assert_computes_the_same(s.svd)


def cached(s: Specimen) -> None:
    """The same within cached(), twice."""
    with torch.no_grad(), fasth.cached():
        for _ in range(2):
            s.assert_same(output(s.svd, s.x), s.expected)


def report(s: Specimen) -> None:
    """Every layer with a matrix is converted, and holds its weights as SVDs, or has the reason why not."""
    found = {c.name: c for c in s.report}
    for name, module in s.plain.named_modules():
        if not isinstance(module, MATRICES) or name.endswith("parametrizations"):
            continue
        assert name in found, f"{name} is not in the report"
        assert found[name].after or found[name].reason, f"{found[name]}"
        converted = any(True for _ in named_held_weights(s.svd.get_submodule(name)))
        assert converted == (found[name].after is not None), f"{found[name]}"


def step(s: Specimen) -> None:
    """In training mode the gradients of all other parameters are the same, and so are buffers; then AdamW steps."""
    plain, svd = copy.deepcopy(s.plain), copy.deepcopy(s.svd)
    names = [name for name in others(svd) if name in others(plain) and others(plain)[name].requires_grad]
    assert names or not others(svd)
    expected, theirs = gradients(plain, s.x, names)
    actual, ours = gradients(svd, s.x, names)
    s.assert_same(actual, expected, "the output in training mode")
    assert ours.keys() == theirs.keys()
    largest = max((g.abs().max().item() for g in theirs.values()), default=1.0)
    for name, gradient in ours.items():
        off = (gradient - theirs[name]).abs().max().item()
        assert off <= 10 * TOLERANCE * largest, f"the gradient of {name} is off by {off:.1e}, of {largest:.1e}"
    buffers = dict(plain.named_buffers())
    for name, buffer in svd.named_buffers():
        if name in buffers and buffer.is_floating_point():
            s.assert_same(buffer, buffers[name], name) if buffer.numel() else None
    optimizer = torch.optim.AdamW(fasth.param_groups(svd, lr=1e-3, weight_decay=0.01))
    loss = []
    for _ in range(2):
        optimizer.zero_grad()
        torch.manual_seed(1)
        loss.append(output(svd, s.x).square().mean())
        loss[-1].backward()
        optimizer.step()
    assert torch.isfinite(loss[1]) and loss[1] != loss[0]
    for path, layer in svd.named_modules():
        if isinstance(layer, Factored):
            for factor in layer._trained_factors():
                assert factor.grad is None or factor.grad.isfinite().all(), f"a gradient of {path}"


def bfloat16(s: Specimen) -> None:
    """In bfloat16 the error is that of the plain model, within a factor of 4."""
    x, errors = in_dtype(s.x, torch.bfloat16), []
    for model in (s.plain, s.svd):
        try:
            with torch.no_grad():
                out = output(copy.deepcopy(model).bfloat16(), x)
        except RuntimeError as error:
            if model is s.plain:
                raise Skip(str(error)) from None
            raise
        assert out.dtype == torch.bfloat16 or out.dtype == torch.float32
        errors.append((out.double() - s.expected).norm().item())
    assert errors[1] <= 4 * errors[0], f"error {errors[1]:.1e}, of the plain model {errors[0]:.1e}"


def reset(model: nn.Module) -> nn.Module:
    """Other weights in the layers of fasth."""
    for module in model.modules():
        if isinstance(module, Factored):
            module.reset_parameters()
    return model


def state_dict(s: Specimen) -> None:
    """A state_dict of SVDs, written and read, makes another model the same, bit for bit."""
    file = io.BytesIO()
    torch.save(s.svd.state_dict(), file)
    file.seek(0)
    other = reset(copy.deepcopy(s.svd))
    other.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        assert torch.equal(output(other, s.x), output(s.svd, s.x))


def plain_checkpoint(s: Specimen) -> None:
    """The plain model's state_dict loads into the converted one."""
    other = reset(copy.deepcopy(s.svd))
    other.load_state_dict(s.plain.state_dict())
    s.assert_computes_the_same(other)


def to_dense(s: Specimen) -> None:
    """Back come the same classes, the same names and the same values."""
    dense = fasth.to_dense(s.svd)
    kinds = [[(name, type(module)) for name, module in model.named_modules()] for model in (dense, s.plain)]
    assert kinds[0] == kinds[1]
    ours, theirs = dense.state_dict(), s.plain.state_dict()
    assert [*ours] == [*theirs]
    for name, tensor in theirs.items():
        if tensor.is_floating_point() and tensor.numel():
            s.assert_same(ours[name], tensor, name)
    s.assert_computes_the_same(dense)


def copies(s: Specimen) -> None:
    """A deepcopy, and a pickle where the plain model has one, compute the same and share nothing with the model.

    PyTorch pickles no modules with parametrized tensors, as to_svd makes of grouped convolutions and attention.
    """
    made = [copy.deepcopy(s.svd)]
    try:
        pickled(s.plain)
    except Exception:
        pass  # some hold functions, or weights under torch's parametrizations
    else:
        if not any(is_parametrized(module) for module in s.svd.modules()):
            made.append(pickled(s.svd))
    for other in made:
        s.assert_computes_the_same(other)
        reset(other)
    s.assert_computes_the_same(s.svd)


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read: nn.Module = torch.load(file, weights_only=False)
    return read


def optimizers(s: Specimen) -> None:
    """AdamW and SGD over param_groups make the same steps one by one, by foreach and fused; in float32."""
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        results = []
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            model = copy.deepcopy(s.svd).float()
            groups = fasth.param_groups(model, lr=1e-3, weight_decay=0.01, optimizer=kind)
            optimizer = kind(groups, **options)
            for seed in range(2):
                torch.manual_seed(seed)
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
                optimizer.step()
            results.append([*model.parameters()])
        for other in results[1:]:
            for ours, first in zip(other, results[0], strict=True):
                torch.testing.assert_close(ours, first, rtol=1e-4, atol=1e-6)


def compress(s: Specimen) -> None:
    """At full energy it computes the same, from plain layers and from SVDs; at less it is of lower rank, and runs."""
    for model in (s.plain, s.svd):
        s.assert_computes_the_same(fasth.compress(model, energy=1.0, trainable=True, report=[]))
    dense = fasth.compress(s.svd, energy=0.7, report=[])
    assert not any(isinstance(module, Factored) for module in dense.modules())
    with torch.no_grad():
        assert output(dense, s.x).isfinite().all()


def compiled(s: Specimen) -> None:
    """torch.compile gives the same values and gradients as eager mode, in float32."""
    backend = "inductor" if str(s.architecture) in BY_INDUCTOR else "aot_eager"
    x, names = in_dtype(s.x, torch.float32), [*others(s.svd)]
    try:
        run_compiled(s.plain, x, [name for name in names if name in others(s.plain)], backend)
    except Exception as error:
        raise Skip(described(error)) from None
    expected, theirs = gradients(copy.deepcopy(s.svd).float(), x, names)
    actual, ours = run_compiled(s.svd, x, names, backend)
    s.assert_same(actual, expected, "the output", 1e-3)
    assert ours.keys() == theirs.keys()
    largest = max((g.abs().max().item() for g in theirs.values()), default=1.0)
    for name, gradient in ours.items():
        off = (gradient - theirs[name]).abs().max().item()
        assert off <= 1e-2 * largest, f"the gradient of {name} is off by {off:.1e}, of {largest:.1e}"


def run_compiled(
    model: nn.Module, x: dict[str, Tensor], names: list[str], backend: str
) -> tuple[Tensor, dict[str, Tensor]]:
    torch.compiler.reset()
    model = copy.deepcopy(model).float().train()
    return gradients(model, x, names, torch.compile(model, backend=backend))


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


CHECKS: dict[str, Callable[[Specimen], None]] = {
    "conversion": conversion,
    "cached": cached,
    "report": report,
    "step": step,
    "bfloat16": bfloat16,
    "state dict": state_dict,
    "plain checkpoint": plain_checkpoint,
    "to_dense": to_dense,
    "copies": copies,
    "optimizers": optimizers,
    "compress": compress,
    "compile": compiled,
}
