"""One run: the first training of the model, or its fine-tuning by one adapter."""

from __future__ import annotations

import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from experiments import harness
from experiments.finetune import texts
from experiments.finetune.methods import METHODS
from experiments.harness import Record, Run

BATCH, LENGTH = 8, 96
FIRST_RATE, PATIENCE = 4e-3, 5  # of the first training; the first steps are not timed
POINTS = 40  # of a learning curve
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4}
FIRST = "first training"


def new_model() -> Any:
    """A language model with the configuration of Llama, of characters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=texts.CHARACTERS, max_position_embeddings=LENGTH, use_cache=False, **SIZES)
    return LlamaForCausalLM(config)


def train(run: Run, folder: Path) -> Record:
    warnings.simplefilter("ignore")  # PEFT's
    torch.manual_seed(run["seed"])
    model = new_model()
    if run["method"] == FIRST:
        return first_training(model, run, folder)
    model.load_state_dict(torch.load(folder / file_of(run["first_steps"]), weights_only=True))
    return finetune(model, run)


def file_of(first_steps: int) -> str:
    return f"model-{first_steps}.pt"


def first_training(model: Any, run: Run, folder: Path) -> Record:
    groups = [{"params": list(model.parameters()), "lr": FIRST_RATE, "weight_decay": 0.1}]
    losses, seconds = fit(model, groups, texts.first().training, run)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / file_of(run["steps"]))
    return result(model, losses, seconds, [])


def finetune(base: Any, run: Run) -> Record:
    method = METHODS[run["method"]]
    model = method.adapt(base)
    model.train()
    groups = [{"weight_decay": 0.0} | group for group in method.groups(model, run["lr"])]
    losses, seconds = fit(model, groups, texts.new().training, run)
    with torch.no_grad():
        return result(model, losses, seconds, method.rotations(model))


def fit(model: nn.Module, groups: list[dict[str, Any]], text: Tensor, run: Run) -> tuple[list[float], list[float]]:
    """AdamW with warmup over a tenth of the steps and a cosine to 0. The losses, and the seconds of each step."""
    steps, generator = run["steps"], Generator().manual_seed(run["seed"])
    optimizer = torch.optim.AdamW(groups)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, max(1, steps // 10))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - steps // 10))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [max(1, steps // 10)])
    losses, seconds = [], []
    for _ in range(steps):
        tokens = texts.batch(text, BATCH, LENGTH + 1, generator)
        begin = time.perf_counter()
        loss = loss_of(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        schedule.step()
        losses.append(loss.item())
    return losses, seconds


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Nats a character."""
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def result(model: nn.Module, losses: list[float], seconds: list[float], rotations: list[Tensor]) -> Record:
    model.eval()
    with torch.no_grad():
        tests = [evaluated(model, text.test) for text in (texts.new(), texts.first())]
    errors = [(Q.mT.double() @ Q.double() - torch.eye(len(Q)).double()).abs().max().item() for Q in rotations]
    timed = seconds[PATIENCE:] or seconds
    return {
        "new": harness.finite(tests[0], 5),
        "first": harness.finite(tests[1], 5),
        "train": harness.finite(statistics.fmean(losses[-max(1, len(losses) // 10) :]), 5),
        "curve": harness.means(losses, POINTS, 4),
        "tokens": round(BATCH * LENGTH / statistics.median(timed)),
        "saved": round(saved_mebibytes(model), 2),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "error": harness.finite(max(errors), None) if errors else None,
    }


def evaluated(model: nn.Module, text: Tensor, count: int = 128) -> float:
    tokens = texts.windows(text, count, LENGTH + 1)
    return statistics.fmean(loss_of(model, part).item() for part in tokens.split(32))


def saved_mebibytes(model: nn.Module) -> float:
    """Size of the tensors that autograd saves in one step, each storage once, without the parameters."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t  # which keeps its address its own
        return t

    model.train()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = loss_of(model, texts.windows(texts.new().test, BATCH, LENGTH + 1))
    del loss
    return sum(t.untyped_storage().nbytes() for t in kept.values()) / 2**20
