"""Trains a small network on several processes, with every weight held as its SVD.

A dense network is converted by fasth.to_svd, then sharded by FSDP2, or replicated by DistributedDataParallel with
--ddp. All processes together save a checkpoint, which one process then loads alone. On CPUs, by gloo; the data are
the 8×8 digits of scikit-learn.

Run: torchrun --nproc-per-node 2 examples/distributed.py
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fasth

BATCH, LEARNING_RATE, WEIGHT_DECAY, CLIP = 32, 1e-3, 0.01, 1.0  # BATCH images on each process


def network() -> nn.Sequential:
    dense = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return fasth.to_svd(dense)


def digits() -> tuple[Tensor, Tensor]:
    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(classes))
    return (torch.tensor(pixels, dtype=torch.float32) / 16)[order], torch.tensor(classes)[order]


def distributed(model: nn.Sequential, ddp: bool) -> nn.Module:
    if ddp:
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, fasth.LinearSVD):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batches(images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """This process's part of each batch. All draw the same order, having the same seed."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for batch in torch.randperm(len(labels)).split(BATCH * size):
        if len(batch) == BATCH * size:
            mine = batch[rank::size]
            yield images[mine], labels[mine]


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    # After wrapping: an optimizer is to hold the shards.
    groups = fasth.param_groups(model, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    optimizer = torch.optim.AdamW(groups)
    for epoch in range(epochs):
        losses = []
        for x, y in batches(images, labels):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        say(f"epoch {epoch + 1}: loss {mean(torch.stack(losses)):.4f}")


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    correct = (model(images).argmax(-1) == labels).float()
    model.train()
    return 100 * correct.mean().item()


def mean(values: Tensor) -> float:
    """Over the values of all processes."""
    total = values.mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def in_one_process(directory: str) -> nn.Module:
    model = network()
    state = {"model": get_model_state_dict(model)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no other process takes part, which is the point
        checkpoint.load(state, checkpoint_id=directory, no_dist=True)
    set_model_state_dict(model, state["model"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddp", action="store_true", help="replicate the model instead of sharding it")
    parser.add_argument("--epochs", type=int, default=8, help="default 8")
    parser.add_argument("--checkpoint", help="the directory for it; by default one that is removed again")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same on all: FSDP shards what each has, and leaves buffers as they are
    images, labels = digits()
    training, test = slice(len(labels) * 4 // 5), slice(len(labels) * 4 // 5, None)
    model = distributed(network(), options.ddp)
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    say(f"{dist.get_world_size()} processes, with {held:,} numbers to train on the first")
    train(model, images[training], labels[training], options.epochs)
    # Every process evaluates the same images, as each call gathers the parameters from all processes.
    say(f"test accuracy: {accuracy(model, images[test], labels[test]):.1f} %")
    say(str(fasth.spectra(model)))

    with tempfile.TemporaryDirectory() as temporary:
        directory = [options.checkpoint or temporary]
        dist.broadcast_object_list(directory)
        checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=directory[0])
        if dist.get_rank() == 0:
            loaded = in_one_process(directory[0])
            print(f"loaded in one process: {accuracy(loaded, images[test], labels[test]):.1f} %", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
