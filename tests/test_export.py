"""Models that leave Python: ``torch.export``, saved and loaded, and ONNX."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from layers import CASES, PARAMETRIZED, of_every, output
from processes import script
from torch import nn
from torch.nn.utils import parametrize

import fasth
import fasth.nn as fnn
from fasth import spectrum
from fasth.tools.twins import perturbed


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        fnn.LinearSVD(12, 16, spectrum=spectrum.between(0.5, 2)),
        nn.Tanh(),
        fnn.LinearSymmetric(16),
        fnn.LinearOrthogonal(16, 9),
        fnn.LinearSVD(9, 12, reflectors="full"),
        nn.Unflatten(1, (1, 3, 4)),
        fnn.Conv2dSVD(1, 2, 3, padding=1),
    ).eval()


def test_an_exported_model_runs_without_fasth(tmp_path):
    ours, files = model(), {strict: str(tmp_path / f"strict {strict}.pt2") for strict in (False, True)}
    batch = torch.export.Dim("batch", max=4096)
    for strict, file in files.items():
        program = torch.export.export(ours, (torch.randn(4, 12),), dynamic_shapes=({0: batch},), strict=strict)
        torch.export.save(program, file)
    inputs = [torch.randn(rows, 12) for rows in (1, 3, 200)]
    torch.save([(x, ours(x).detach()) for x in inputs], tmp_path / "expected.pt")
    script(f"""
import sys, torch

for file in {list(files.values())}:
    loaded = torch.export.load(file).module()
    for x, expected in torch.load({str(tmp_path / "expected.pt")!r}):
        torch.testing.assert_close(loaded(x), expected, rtol=1e-4, atol=1e-5)
assert not any(name.split(".")[0] == "fasth" for name in sys.modules)
""")


def exported(model, x, strict=False):
    return torch.export.export(model, (x,), strict=strict)


def number_of_nodes(program):
    """The operations of a program: all nodes but its inputs and its output."""
    return sum(node.op == "call_function" for node in program.graph.nodes)


@pytest.mark.parametrize(("layer", "most"), [(fnn.LinearSVD, 280), (fnn.LinearOrthogonal, 150)])
def test_products_are_few(layer, most):
    """512 reflections a side are four blocks, where the compiled core has sixteen."""
    assert number_of_nodes(exported(layer(512, 512), torch.randn(2, 512))) < most


@pytest.mark.parametrize("spread", [0, 1e-3, 1e-1], ids=["equal", "nearly parallel", "alike"])
@pytest.mark.parametrize("d", [64, 256, 512])
def test_exported_products_are_orthogonal(d, spread):
    """LAPACK's measure of orthogonality, in float32, for the hardest reflectors."""
    torch.manual_seed(0)
    layer = fnn.LinearOrthogonal(d, d, False, reflectors="full")
    with torch.no_grad():
        layer.reflectors.copy_(1 + spread * torch.randn(d, d))
    Q = exported(layer, torch.eye(d)).module()(torch.eye(d)).detach().double()
    error = torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(d), 1) / (d * torch.finfo(torch.float32).eps)
    assert error < 30


# With cached weights


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights:UserWarning")  # nn.LSTM's
@of_every(CASES)
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_a_cached_weight_is_a_constant(case, strict):
    ours, x = perturbed(case.make(dtype=torch.float64)).eval(), case.input(torch.float64)
    with torch.no_grad(), fasth.cached():
        expected = output(ours, x)
        entry = ours._cache.entry
        program = exported(ours, x, strict)
        assert ours._cache.entry is entry
        assert torch.equal(output(ours, x), expected)
    torch.testing.assert_close(output(program.module(), x), expected)
    if getattr(ours, "nonlinearity", "") != "modrelu":  # which torch's kernel has not
        dense = exported(case.dense().double().eval(), x, strict)
        factors = 2 if getattr(ours, "_is_thin", False) else 1
        assert number_of_nodes(program) <= number_of_nodes(dense) + factors - 1
    constants = [t for name, t in program.constants.items() if "_layout" not in name]
    assert sorted(t.shape for t in constants) == sorted(t.shape for t in entry.tensors())
    assert all(type(t) is torch.Tensor and not t.requires_grad for t in constants)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_any_number_of_rows_with_cached_weights(strict):
    ours, batch = model(), torch.export.Dim("batch", max=4096)
    with torch.no_grad(), fasth.cached():
        ours(torch.randn(4, 12))
        program = torch.export.export(ours, (torch.randn(4, 12),), dynamic_shapes=({0: batch},), strict=strict)
    assert number_of_nodes(program) == len(ours)
    for rows in (1, 3, 200):
        x = torch.randn(rows, 12)
        torch.testing.assert_close(program.module()(x), ours(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("why", ["never called", "gradients", "called with gradients", "called in inference mode"])
def test_other_programs_have_the_products(why, strict):
    """Programs in which no cached weight can be a constant compute the same, and cache nothing."""
    layer, x = fnn.LinearSVD(12, 12, dtype=torch.float64), torch.randn(3, 12, dtype=torch.float64)
    expected = layer(x)
    with fasth.cached():
        called = {"gradients": torch.no_grad, "called in inference mode": torch.inference_mode}
        if why != "never called":
            with called.get(why, torch.enable_grad)():
                layer(x)
        entry = layer._cache.entry
        with torch.set_grad_enabled(why == "gradients"):
            program = exported(layer, x, strict)
        assert layer._cache.entry is entry
        torch.testing.assert_close(layer(x), expected)
    assert number_of_nodes(program) > 20 and not program.constants
    own = program.module()
    torch.testing.assert_close(own(x), expected)
    own(x).sum().backward()
    assert dict(own.named_parameters())["reflectors"].grad.any()


def test_a_cached_weight_is_not_taken_for_other_tensors():
    """A model that calls its layer with other tensors, too."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = fnn.LinearSVD(4, 4), 3.0

        def forward(self, x):
            tensors = {name: self.scale * p for name, p in self.layer.named_parameters()}
            return self.layer(x), torch.func.functional_call(self.layer, tensors, (x,))

    both, x = Both(), torch.randn(2, 4)
    expected = both(x)
    with torch.no_grad(), fasth.cached():
        both.layer(x)
        program = exported(both, x)
    torch.testing.assert_close(program.module()(x), expected)
    assert len(program.constants) == 1


@of_every(PARAMETRIZED)
def test_parametrized_tensors_have_torchs_cache(case):
    ours, x = perturbed(case.make()), case.input()
    with torch.no_grad(), parametrize.cached():
        expected = ours(x)
        program = exported(ours, x)
    torch.testing.assert_close(program.module()(x), expected)
    assert number_of_nodes(program) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("convert", [fasth.to_dense, lambda model: model], ids=["dense", "factored"])
@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
def test_onnx(convert, cached, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    ours, file = model(), tmp_path / "model.onnx"
    shapes = ({0: torch.export.Dim("batch")},)
    with torch.no_grad(), fasth.cached() if cached else nullcontext():
        ours(torch.randn(4, 12))
        torch.onnx.export(convert(ours), (torch.randn(4, 12),), file, dynamo=True, verbose=False, dynamic_shapes=shapes)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for rows in (2, 70):
        x = torch.randn(rows, 12)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), ours(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracing_says_what_to_do_instead():
    """``torch.jit.trace`` would record the operations of one number of rows, on one backend."""
    for layer in model():
        if isinstance(layer, fnn.factored.Factored):
            shape = (2, 1, 5, 5) if isinstance(layer, fnn.Conv2dSVD) else (2, layer.in_features)
            with pytest.raises(NotImplementedError, match=r"torch\.export.*to_dense"):
                torch.jit.trace(layer, torch.randn(shape))
    traced = torch.jit.trace(fasth.to_dense(model()), torch.randn(2, 12))
    x = torch.randn(3, 12)
    torch.testing.assert_close(traced(x), model()(x), rtol=1e-4, atol=1e-5)


def test_symbolic_tracing():
    """Layers are leaves, which a Tracer has to be told; without that the error says so."""
    with pytest.raises(TypeError, match=r"torch\.fx\.symbolic_trace needs a Tracer .*docs/pytorch\.md"):
        torch.fx.symbolic_trace(model())
    for layer in (fnn.Conv2dSVD(1, 2, 3, spectrum=spectrum.positive()), fnn.RNNSVD(3, 4), fnn.LinearOrthogonal(3, 4)):
        with pytest.raises(TypeError, match=r"got Proxy: torch\.fx\.symbolic_trace needs a Tracer"):
            torch.fx.symbolic_trace(layer)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return type(module).__module__.startswith("fasth.") or super().is_leaf_module(module, name)

    ours, x = model(), torch.randn(3, 12)
    traced = torch.fx.GraphModule(ours, Tracer().trace(ours))
    torch.testing.assert_close(traced(x), ours(x))
    torch.autograd.grad(traced(x).sum(), [p for p in traced.parameters() if p.requires_grad])
