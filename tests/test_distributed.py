"""Two processes compute what one does, under DistributedDataParallel and under FSDP2, with every kind of layer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor, nn

import fasth
from fasth import RNNSVD, Conv2dSVD, LinearOrthogonal, LinearSVD, LinearSymmetric, spectrum
from fasth.nn.factored import Factored

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.parallel import DistributedDataParallel

SIZE, STEPS, BATCH, CLASSES = 2, 20, 8, 3
EXAMPLE = Path(__file__).parents[1] / "examples" / "distributed.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(SIZE, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


class Last(nn.Module):
    """A recurrent net's output at the last time."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0][:, -1]


# Odd sizes, so that no two shards of a parameter are alike, and parameters with fewer rows than there are ranks.
LAYERS = {
    "compact": lambda: LinearSVD(7, 9),
    "full": lambda: LinearSVD(9, 5, reflectors="full", spectrum=spectrum.between(0.5, 2.0)),
    "normalized": lambda: LinearSVD(9, 9, spectrum=spectrum.normalized()),
    "one row": lambda: LinearSVD(9, 1),
    "symmetric": lambda: LinearSymmetric(9, spectrum=spectrum.positive()),
    "orthogonal": lambda: LinearOrthogonal(9, 5),
    "orthogonal, tall": lambda: LinearOrthogonal(5, 9, reflectors="full"),
    "conv": lambda: Conv2dSVD(3, 5, 3, padding=1),
    "rnn": lambda: Last(RNNSVD(7, 5, num_layers=2, bidirectional=True, batch_first=True)),
}
INPUTS = {"conv": (3, 4, 4), "all": (3, 4, 4), "rnn": (6, 7), "compact": (7,), "orthogonal, tall": (5,)}
INPUTS = dict.fromkeys(LAYERS, (9,)) | INPUTS
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.02),
}
WRAPPERS = ["ddp", "fsdp", "fsdp, one group"]


def network(kind: str, seed: int = 0) -> nn.Sequential:
    """One layer of the kind, or "all" in a row, and a dense one that ends in the classes."""
    torch.manual_seed(seed)
    if kind == "all":
        layers = [
            LAYERS["conv"](),
            nn.Flatten(2),  # the channels are the times
            Last(RNNSVD(16, 7, batch_first=True)),
            *(LAYERS[name]() for name in ("compact", "symmetric", "full", "orthogonal, tall", "orthogonal")),
        ]
    else:
        layers = [LAYERS[kind]()]
    model = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))
    model.extend([nn.Flatten(), nn.LazyLinear(CLASSES)])
    model(torch.zeros(1, *INPUTS[kind]))
    return model


def batches(kind: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, BATCH, *INPUTS[kind], generator=generator, dtype=torch.float64).to(dtype)
    return list(zip(x, torch.randint(CLASSES, (STEPS, BATCH), generator=generator), strict=True))


def wrapped(model: nn.Sequential, wrapper: str, **options: Any) -> Any:
    if wrapper == "ddp":
        return DistributedDataParallel(model, **options)
    mesh = init_device_mesh("cpu", (SIZE,))
    if wrapper == "fsdp":
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def optimizer_of(model: nn.Module, name: str = "SGD") -> torch.optim.Optimizer:
    return OPTIMIZERS[name](fasth.param_groups(model, weight_decay=0.1))


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> list[list[float]]:
    """The loss and the norm of the gradient at each step."""
    found = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append([loss.item(), whole(norm).item()])
    return found


def share(data: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of each batch."""
    return [(x.chunk(SIZE)[dist.get_rank()], y.chunk(SIZE)[dist.get_rank()]) for x, y in data]


def assert_same(rank_results: list[list[list[float]]], single_result: list[list[float]], tolerance: float) -> None:
    """Losses, whose mean over the ranks is that of the batch, and norms, which all ranks know."""
    found, expected = torch.tensor(rank_results, dtype=torch.float64), torch.tensor(single_result, dtype=torch.float64)
    torch.testing.assert_close(found[..., 0].mean(0), expected[:, 0], rtol=tolerance, atol=0)
    for norms in found[..., 1]:
        torch.testing.assert_close(norms, expected[:, 1], rtol=tolerance, atol=0)


def train_on_rank(kind: str, wrapper: str, optimizer: str, dtype: torch.dtype) -> list[list[float]]:
    # DDP starts from what the first rank has. Under FSDP every rank has to start from the same.
    seed = dist.get_rank() if wrapper == "ddp" else 0
    model = wrapped(network(kind, seed).to(dtype), wrapper)
    return train(model, optimizer_of(model, optimizer), share(batches(kind, dtype)))


def train_alone(kind: str, optimizer: str, dtype: torch.dtype) -> list[list[float]]:
    model = network(kind).to(dtype)
    return train(model, optimizer_of(model, optimizer), batches(kind, dtype))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", [*LAYERS, "all"])
def test_losses_are_those_of_one_process(ranks, kind, wrapper):
    run = "SGD", torch.float64
    assert_same(ranks(train_on_rank, kind, wrapper, *run), train_alone(kind, *run), 1e-12)


# Adam divides by the size of a gradient, and so makes much of what is zero but for rounding: the gradient along a full
# reflector. In single precision there is more of it.
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("run", "tolerance"), [(("AdamW", torch.float64), 1e-9), (("SGD", torch.float32), 1e-4)], ids=["AdamW", "float32"]
)
def test_losses_with_larger_roundings(ranks, wrapper, run, tolerance):
    assert_same(ranks(train_on_rank, "all", wrapper, *run), train_alone("all", *run), tolerance)


def load_alone(kind: str, model: nn.Module) -> nn.Module:
    """A model of one process with the parameters that the ranks have."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    alone = network(kind).to(next(iter(state.values())).dtype)
    alone.load_state_dict(state)
    return alone


@patch.object(_fsdp_param, "free_storage", lambda tensor: None)
def evaluate_between_changes(wrapper: str) -> list[float]:
    """Distance of the model's output in eval mode from that of its parameters, after each of many changes.

    FSDP frees parameters after use, and gathers them at the same address if chance has it. Here it always has.
    """
    model = wrapped(network("all").double(), wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    differences = []
    for i, (x, y) in enumerate(share(batches("all", torch.float64))[:12]):
        if i % 4 == 0:
            model.train()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 4 == 0:
            model.eval()  # and there it stays for the next rounds: a part of a model may be trained so
        if i % 4 == 3:  # in place and unseen by the model, as a checkpoint is loaded
            for name, value in model.state_dict().items():
                getattr(value, "_local_tensor", value).mul_(1 if "signs" in name else 1.1)
        with torch.no_grad():
            found = model(x), model(x)
        expected = load_alone("all", model)(x)
        differences.append(max((y - expected).abs().max().item() for y in found))
    return differences


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_evaluation_sees_every_change(ranks, wrapper):
    for differences in ranks(evaluate_between_changes, wrapper):
        assert max(differences) < 1e-12


def evaluate_within_cached(wrapper: str) -> float:
    model = wrapped(network("all").double(), wrapper)
    x, alone = batches("all", torch.float64)[0][0], load_alone("all", model)
    with torch.no_grad(), fasth.cached():
        return max((model(x) - alone(x)).abs().max().item() for _ in range(2))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_cached(ranks, wrapper):
    assert max(ranks(evaluate_within_cached, wrapper)) < 1e-12


def save_on_ranks(wrapper: str, directory: str, steps: int) -> None:
    model = wrapped(network("all").double(), wrapper)
    optimizer = optimizer_of(model)
    train(model, optimizer, share(batches("all", torch.float64))[:steps])
    save(model, optimizer, directory)


def continue_on_ranks(wrapper: str, directory: str, steps: int) -> list[list[float]]:
    model = wrapped(network("all", seed=1).double(), wrapper)
    optimizer = optimizer_of(model)
    load(model, optimizer, directory)
    return train(model, optimizer, share(batches("all", torch.float64))[steps:])


def save(model: nn.Module, optimizer: torch.optim.Optimizer, directory: str) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, directory: str) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it is: one process loads, and saves, alone
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_checkpoint_goes_from_two_ranks_to_one_and_back(ranks, tmp_path, wrapper):
    """Training, the optimizer included, goes on as if it had never stopped."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    expected, data = train_alone("all", "SGD", torch.float64), batches("all", torch.float64)
    ranks(save_on_ranks, wrapper, first, 5)

    model = network("all", seed=1).double()
    optimizer = optimizer_of(model)
    load(model, optimizer, first)
    assert_same([train(model, optimizer, data[5:10])], expected[5:10], 1e-12)
    save(model, optimizer, second)

    assert_same(ranks(continue_on_ranks, wrapper, second, 10), expected[10:], 1e-12)


def convert_then_wrap(wrapper: str) -> tuple[float, float, str]:
    """Distance of the converted model from the dense one, in outputs and in singular values, and the table of these."""
    torch.manual_seed(0)
    dense, x = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5)).double(), torch.randn(4, 9).double()
    model = wrapped(fasth.to_svd(dense), wrapper)
    spectra = fasth.spectra(model)
    found = torch.cat([layer.singular_values for layer in spectra.values()])
    expected = torch.cat([torch.linalg.svdvals(layer.weight) for layer in dense[::2]])
    return torch.dist(model(x), dense(x)).item(), torch.dist(found, expected).item(), str(spectra)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_converted_model_knows_its_spectra(ranks, wrapper):
    for output_error, value_error, table in ranks(convert_then_wrap, wrapper):
        assert output_error < 1e-13 and value_error < 1e-13
        assert "7×9" in table and "5×7" in table


def start_from_meta(kind: str) -> tuple[list[Any], list[list[float]], float]:
    """The output, the singular values, and how far the output is from that of one process with these parameters."""
    with torch.device("meta"):
        model = nn.Sequential(LAYERS[kind]())
    model = wrapped(model, "fsdp").to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    for layer in model.modules():
        if isinstance(layer, Factored):
            layer.reset_parameters()
    x, alone = batches(kind, torch.float32)[0][0], nn.Sequential(LAYERS[kind]())
    alone.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    out, sigmas = model(x), [layer.singular_values.tolist() for layer in fasth.spectra(model).values()]
    return out.tolist(), sigmas, torch.dist(out, alone(x)).item()


@pytest.mark.parametrize("kind", LAYERS)
def test_ranks_that_start_from_meta_draw_one_model(ranks, kind):
    """Each with a seed of its own: reflectors that are half from one and half from the other need one set of signs."""
    (out, sigmas, difference), (other_out, other_sigmas, _) = ranks(start_from_meta, kind)
    assert out == other_out and sigmas == other_sigmas
    assert difference < 1e-6
    for sigma in sigmas:
        others = 0.99 if kind == "normalized" else 1.0
        torch.testing.assert_close(sigma, [1.0] + [others] * (len(sigma) - 1), rtol=1e-6, atol=0)


def compute_in_bfloat16(kind: str) -> tuple[bool, float, set[torch.dtype]]:
    """True if equal to one process in bfloat16; the distance of eval from training; the gradients' dtypes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, x = wrapped(network(kind), "fsdp", mp_policy=policy), batches(kind, torch.float32)[0][0]
    found, expected = model(x), network(kind).bfloat16()(x.bfloat16())
    found.float().sum().backward()
    with torch.no_grad():
        difference = torch.dist(model.eval()(x), found) / found.norm()
    return (
        torch.equal(found, expected),
        difference.item(),
        {p.grad.dtype for p in model.parameters() if p.requires_grad},
    )


@pytest.mark.parametrize("kind", [*LAYERS, "all"])
def test_parameters_gathered_in_bfloat16(ranks, kind):
    for same, difference, gradients in ranks(compute_in_bfloat16, kind):
        assert same and gradients == {torch.float32}
        assert difference < 10 * torch.finfo(torch.bfloat16).eps


def invert_on_rank() -> float:
    torch.manual_seed(0)
    layer, x = LinearSVD(9, 9).double(), torch.randn(4, 9, dtype=torch.float64)
    fully_shard(layer, mesh=init_device_mesh("cpu", (SIZE,)))
    register_fsdp_forward_method(layer, "inverse")
    y = layer(x)
    layer.reshard()
    return torch.dist(layer.inverse(y), x).item()


def test_other_methods_gather_once_they_are_registered(ranks):
    assert max(ranks(invert_on_rank)) < 1e-12


def test_the_example_starts_with_torchrun(tmp_path):
    pytest.importorskip("sklearn")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE)]
    done = subprocess.Popen(
        [*torchrun, str(EXAMPLE), "--epochs", "1", "--checkpoint", str(tmp_path / "checkpoint")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = done.communicate(timeout=120)
    except BaseException:
        os.killpg(done.pid, signal.SIGKILL)  # torchrun and the processes that it has started
        done.wait()
        raise
    assert done.returncode == 0, errors
    assert "loaded in one process" in output
