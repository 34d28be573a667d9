"""The fine-tuning of a language model: every method starts as the first model, and the command reports and resumes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.libraries import define_operators_of_torchvision, missing

pytest.importorskip("experiments")

from experiments import harness
from experiments.finetune import texts, training
from experiments.finetune.__main__ import EXPERIMENT
from experiments.finetune.methods import METHODS, OURS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def small_model() -> Any:
    if lacking := missing(("transformers", "peft")):
        pytest.skip(f"{' and '.join(lacking)} not installed; `make zoo` installs them")
    define_operators_of_torchvision()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "SIZES", training.SIZES | {"num_hidden_layers": 1})
        yield


def test_every_method_starts_as_the_first_model_and_has_as_many_parameters() -> None:
    torch.manual_seed(0)
    base, tokens = training.new_model().eval(), torch.randint(128, (2, 20))
    expected, counts = base(input_ids=tokens).logits, {}
    for name, method in METHODS.items():
        model = method.adapt(copy.deepcopy(base)).eval()
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=1e-3, atol=1e-4, msg=name)
        counts[name] = sum(
            p.numel() for group in method.groups(model, 1e-3) for p in group["params"] if p.requires_grad
        )
        for Q in method.rotations(model):
            torch.testing.assert_close(Q, torch.eye(len(Q)), rtol=0, atol=1e-4)
        assert bool(method.rotations(model)) == (name in (*OURS, "OFT", "HRA"))
    whole = counts.pop("all weights")
    assert whole > 3 * max(counts.values()) and max(counts.values()) < 1.5 * min(counts.values()), counts


def test_the_texts_are_apart() -> None:
    text = texts.new()
    training_part, test_part = (set(bytes(part.tolist()).decode().split("\n\n")) for part in text)
    assert len(test_part) > 5 and not training_part & test_part
    assert texts.windows(text.test, 3, 10).shape == (3, 10)
    assert torch.equal(texts.windows(text.test, 3, 10)[-1], text.test[-10:])


ARGUMENTS = ("--quick", "--methods", "LoRA", "reflections", "--steps", "5", "--seeds", "1", "--workers", "0")


def test_the_command_writes_a_table_and_a_picture_and_resumes(tmp_path: Path) -> None:
    assert harness.main(EXPERIMENT, [*ARGUMENTS, "--out", str(tmp_path)]) == 0
    report = (tmp_path / "tables.md").read_text()
    assert "| **reflections** |" in report and "| LoRA |" in report and "| before |" in report
    assert (tmp_path / "finetune.png").read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()[1:]]
    assert len(records) == 1 + 2 * 2
    assert records[0]["curve"][-1] < records[0]["curve"][0] - 1, "the first model has learned"
    assert records[-1]["error"] < 1e-5 and records[1]["error"] is None
    before = (tmp_path / "results.jsonl").read_text()
    assert harness.main(EXPERIMENT, [*ARGUMENTS, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "results.jsonl").read_text() == before
