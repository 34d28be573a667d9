"""The flows: their densities agree with the definition, and the command chooses, reports and resumes."""

from __future__ import annotations

import json

import pytest
import torch
from torch.autograd.functional import jacobian

import fasth
from fasth.flows import whiten_

pytest.importorskip("experiments")

from experiments import harness
from experiments.flow import training
from experiments.flow.__main__ import EXPERIMENT
from experiments.flow.grid import FULL, best, finals
from experiments.flow.models import IMAGE_MIXERS, MIXERS, STARTS, Flow, installed
from experiments.harness import data
from experiments.harness.results import Results

NEVER_SINGULAR = ("orthogonal", "positive", "between")


@pytest.fixture(scope="module")
def small_images():
    """The images are scikit-learn's digits, whatever is installed."""
    caches = (data.pixels, training.images)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "FOLDERS", {})
        for function in caches:
            function.cache_clear()
        yield
    for function in caches:
        function.cache_clear()


@pytest.fixture
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def a_run(**settings) -> harness.Run:
    return {"task": "table", "data": "digits", "mixer": "free", "start": "rotation", "lr": 1e-3, "seed": 0, "steps": 1,
            **settings}  # fmt: skip


def started(mixer, start):
    """A flow of table rows, and the batch that it starts from."""
    made = training.new_flow(a_run(mixer=mixer, start=start))
    x = training.table().batch(512, torch.Generator().manual_seed(0))
    made(x, normalize=True)
    return made, x


@pytest.mark.parametrize("start", STARTS)
def test_all_mixers_start_as_the_same_function(start):
    losses = {}
    for mixer in installed():
        made, x = started(mixer, start)
        losses[mixer] = made.nats(x).mean().item()
    losses.pop("nflows QR", None)
    assert len(losses) >= 7
    for mixer, loss in losses.items():
        assert loss == pytest.approx(losses["dense"], rel=1e-4), mixer


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("mixer", ["fixed", "dense", "PLU", "orthogonal", "free", "positive", "between"])
@pytest.mark.parametrize("shape", [(6,), (1, 4, 4)], ids=str)
def test_density_is_that_of_the_jacobian(in_double, shape, mixer, start):
    torch.manual_seed(0)
    density_is_that_of_the_jacobian(Flow(shape, MIXERS[mixer], start, steps=2, width=4), shape)


@pytest.mark.parametrize("mixer", IMAGE_MIXERS)
def test_convolutions_start_as_the_1x1_that_they_replace(in_double, small_images, mixer):
    x = training.images().training[:16].double()
    flows = []
    for made in (MIXERS["dense"], IMAGE_MIXERS[mixer]):
        torch.manual_seed(0)
        flows.append(Flow((1, 8, 8), made, "whitening", steps=2, width=4))
        flows[-1](x, normalize=True)
    for expected, found in zip(*(flow(x) for flow in flows), strict=True):
        torch.testing.assert_close(found, expected)
    density_is_that_of_the_jacobian(Flow((1, 4, 4), IMAGE_MIXERS[mixer], "rotation", steps=2, width=4), (1, 4, 4))


def density_is_that_of_the_jacobian(made, shape):
    made(torch.randn(50, *shape), normalize=True)
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # the couplings were the identity
    x = torch.randn(3, *shape)
    z, logabsdet = made(x)
    assert z.shape[1:] == made.latent_shape
    torch.testing.assert_close(made.inverse(z), x)
    for sample, value in zip(x, logabsdet, strict=True):
        J = jacobian(lambda t: made(t.unsqueeze(0))[0].flatten(), sample).reshape(sample.numel(), -1)
        torch.testing.assert_close(torch.linalg.slogdet(J).logabsdet, value)


def test_the_start_is_what_whiten_does():
    made, x = started("free", "whitening")
    step = made.levels[0][0]
    rows = x * step.log_scale.exp() + step.shift
    layer = whiten_(fasth.LinearSVD(64, 64, bias=False).set_weight_(step.W), rows)
    torch.testing.assert_close(layer.weight, step.mixer.layer.weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("task", ["images", "table"])
@pytest.mark.parametrize("mixer", NEVER_SINGULAR)
def test_ten_times_a_sensible_rate(small_images, tmp_path, task, mixer):
    """The loss stays finite, and the inverse undoes the flow. In 60 steps the schedule rises to a third of the rate."""
    found = training.train(a_run(task=task, mixer=mixer, lr=0.165, steps=60), tmp_path)
    assert None not in found["curve"] and found["validation"] is not None
    assert found["inverse"] < 1e-3


def test_training_improves_the_score_and_can_be_repeated(tmp_path):
    run = a_run(mixer="positive", start="permutation", lr=2e-3, seed=1, steps=40)
    first, again = training.train(run, tmp_path), training.train(run, tmp_path)
    assert first == again
    assert first["curve"][-1] < first["curve"][0] - 5 and first["test"] < first["curve"][0] - 5


ARGUMENTS = ("--quick", "--mixers", "dense", "free", "--steps", "8", "--seeds", "1", "--rounds", "1", "--workers", "0")


@pytest.fixture(scope="module")
def finished(small_images, tmp_path_factory):
    """The folder of a tiny experiment on both tasks."""
    folder = tmp_path_factory.mktemp("flow")
    assert harness.main(EXPERIMENT, [*ARGUMENTS, "--out", str(folder)]) == 0
    return folder


def test_the_command_writes_tables_and_pictures(finished):
    report = (finished / "tables.md").read_text()
    assert "**fasth free**" in report and "bits/dim" in report and "nats" in report
    for name in ("curves.png", "samples.png"):
        assert (finished / name).read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in (finished / "results.jsonl").read_text().splitlines()[1:]]
    settings = {(record["task"], record["mixer"], record["seed"]) for record in records}
    assert settings == {(task, mixer, seed) for task in training.DATA for mixer in ("dense", "free") for seed in (0, 1)}
    assert len(list((finished / "samples").iterdir())) == 2, "of images, with the first seed"


def test_the_command_resumes(finished, tmp_path):
    lines = (finished / "results.jsonl").read_text().splitlines(keepends=True)
    file = tmp_path / "results.jsonl"
    table = [line for line in lines if '"task": "images"' not in line]
    file.write_text("".join(table)[:-10])  # cut off in the middle of the last record
    assert harness.main(EXPERIMENT, [*ARGUMENTS, "--tasks", "table", "--out", str(tmp_path)]) == 0
    again = file.read_text().splitlines(keepends=True)
    assert again[:-1] == table[:-1] and json.loads(again[-1]) == json.loads(table[-1])


def test_one_seed_chooses_the_setting_and_others_judge_it(tmp_path):
    def record(lr, seed, validation, test):
        return a_run(mixer="dense", lr=lr, seed=seed) | {"validation": validation, "test": test}

    records = [record(0.1, 0, 3.0, 1.0), record(0.2, 0, 2.0, 9.0), record(0.3, 0, None, None)]
    winner = best(records, task="table")
    assert winner.chosen["lr"] == 0.2 and str(winner) == "9.000"
    results = Results(tmp_path / "results.jsonl", EXPERIMENT.found, {"versions": {}})
    for one in records:
        results.add(one)
    runs = finals([results.settings(one) for one in records], results, FULL)
    assert [(run["lr"], run["seed"]) for run in runs] == [(0.2, 1), (0.2, 2), (0.2, 3)]
    winner = best([*records, record(0.2, 1, 4.0, 11.0), record(0.2, 2, 4.0, 13.0)])
    assert winner.chosen["lr"] == 0.2 and str(winner) == "12.00 ± 1.4"  # of the seeds that did not choose it
    assert str(best(records[-1:])) == "diverged" and best(records, task="images") is None
