"""fasth.optim.AdamW on two processes takes the steps of one: a sharded tensor's turn has the size of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

from fasth import LinearSVD
from fasth.optim import AdamW

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

SIZE, STEPS = 2, 8


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(SIZE, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


def network(seed: int = 0) -> nn.Sequential:
    """Odd sizes, and a layer with fewer rows than there are processes."""
    torch.manual_seed(seed)
    layers = (LinearSVD(7, 9), nn.Tanh(), LinearSVD(9, 5, reflectors="full"), nn.Tanh(), LinearSVD(5, 1))
    return nn.Sequential(*layers).double()


def wrapped(model: nn.Module, wrapper: str) -> Any:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "hsdp":
        mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("replicated", "sharded"))
    else:
        mesh = init_device_mesh("cpu", (SIZE,))
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, steps: range, optimizer: AdamW, part: slice) -> list[float]:
    """The losses, with a warm-up from 0."""
    losses = []
    for t in steps:
        for group in optimizer.param_groups:
            group["lr"] = min(t / 4, 1.0) * group["initial_lr"]
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(t), dtype=torch.float64)[part]
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def optimizer_of(model: nn.Module, fused: bool = False) -> AdamW:
    optimizer = AdamW(model, lr=0.02, fused=fused)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def mine() -> slice:
    return slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)


def train_on_rank(wrapper: str, fused: bool) -> list[float]:
    model = wrapped(network(), wrapper)
    return train(model, range(STEPS), optimizer_of(model, fused), mine())


def assert_same(rank_losses: list[list[float]], expected: list[float]) -> None:
    found = torch.tensor(rank_losses, dtype=torch.float64).mean(0)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)


def train_alone() -> list[float]:
    model = network()
    return train(model, range(STEPS), optimizer_of(model), slice(None))


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "hsdp"])
def test_losses_are_those_of_one_process(ranks: Ranks, wrapper: str, fused: bool) -> None:
    assert_same(ranks(train_on_rank, wrapper, fused), train_alone())


def save_on_rank(wrapper: str, directory: str) -> None:
    model = wrapped(network(), wrapper)
    optimizer = optimizer_of(model)
    train(model, range(STEPS // 2), optimizer, mine())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)


def resume_on_rank(wrapper: str, directory: str) -> list[float]:
    model = wrapped(network(seed=1), wrapper)
    optimizer = optimizer_of(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(model, range(STEPS // 2, STEPS), optimizer, mine())


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_checkpoint_is_resumed(ranks: Ranks, tmp_path: Any, wrapper: str) -> None:
    """Resumes in the middle of the warm-up, whose peak is part of the state."""
    ranks(save_on_rank, wrapper, str(tmp_path))
    assert_same(ranks(resume_on_rank, wrapper, str(tmp_path)), train_alone()[STEPS // 2 :])
