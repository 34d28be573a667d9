"""The flows of examples/flow.py: their densities are those of the definition, and its command can be stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fasth.reproduce.study import data
from torch.autograd.functional import jacobian

import fasth
from fasth.flows import whiten_

for package in ("matplotlib", "rich", "sklearn"):
    pytest.importorskip(package, reason=f"{package} is not installed; it comes with fasth[dev,reproduce]")

STARTS = ("rotation", "permutation", "whitening")
NEVER_SINGULAR = ("orthogonal", "positive", "between")


@pytest.fixture(scope="module")
def flow():
    """examples/flow.py, with its modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent / "examples")
        import flow
        import flow_models
        import flow_training

        flow.models, flow.training = flow_models, flow_training
        yield flow


@pytest.fixture
def small_images(flow, monkeypatch):
    """The images are scikit-learn's digits, whatever is installed."""
    monkeypatch.setattr(data, "FOLDERS", {})
    for function in (data.pixels, flow.training.images):
        function.cache_clear()
    yield
    for function in (data.pixels, flow.training.images):
        function.cache_clear()


@pytest.fixture
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def started(flow, task, mixer, start, seed=0):
    """A flow and the batch that it starts from."""
    made = flow.training.new_flow(flow.Run(task, "digits", mixer, start, 1e-3, seed, 1))
    x = flow.DATA[task]().batch(512, torch.Generator().manual_seed(0))
    made(x, normalize=True)
    return made, x


@pytest.mark.parametrize("start", STARTS)
def test_all_mixers_start_as_the_same_function(flow, start):
    losses = {}
    for mixer in flow.installed():
        made, x = started(flow, "table", mixer, start)
        losses[mixer] = made.nats(x).mean().item()
    losses.pop("nflows QR", None)
    assert len(losses) >= 7
    for mixer, loss in losses.items():
        assert loss == pytest.approx(losses["dense"], rel=1e-4), mixer


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("mixer", ["fixed", "dense", "PLU", "orthogonal", "free", "positive", "between"])
@pytest.mark.parametrize("shape", [(6,), (1, 4, 4)], ids=str)
def test_density_is_that_of_the_jacobian(flow, in_double, shape, mixer, start):
    torch.manual_seed(0)
    made = flow.models.Flow(shape, flow.models.MIXERS[mixer], start, steps=2, width=4)
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


def test_the_start_is_what_whiten_does(flow):
    made, x = started(flow, "table", "free", "whitening")
    step = made.levels[0][0]
    rows = x * step.log_scale.exp() + step.shift
    layer = whiten_(fasth.LinearSVD(64, 64, bias=False).set_weight_(step.W), rows)
    torch.testing.assert_close(layer.weight, step.mixer.layer.weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("task", ["images", "table"])
@pytest.mark.parametrize("mixer", NEVER_SINGULAR)
def test_ten_times_a_sensible_rate(flow, small_images, task, mixer):
    """The loss stays finite, and the inverse undoes the flow."""
    found = flow.train(flow.Run(task, "digits", mixer, "rotation", 0.1, seed=0, steps=100))  # 0.05 after the warm-up
    assert None not in found["curve"] and found["validation"] is not None
    assert found["inverse"] < 1e-3


def test_training_improves_the_score_and_can_be_repeated(flow):
    run = flow.Run("table", "digits", "positive", "permutation", 2e-3, seed=1, steps=40)
    first, again = flow.train(run), flow.train(run)
    assert first == again
    assert first["curve"][-1] < first["curve"][0] - 5 and first["test"] < first["curve"][0] - 5


ARGUMENTS = ("--quick", "--mixers", "dense", "free", "--steps", "8", "--rounds", "1", "--workers", "1")


def test_the_command_writes_tables_and_pictures_and_goes_on(flow, tmp_path, capsys):
    arguments = [*ARGUMENTS, "--out", str(tmp_path)]
    assert flow.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "fasth free" in shown and "bits/dim" in shown and "nats" in shown
    for name in ("tables.md", "curves.png", "samples.png"):
        assert (tmp_path / name).stat().st_size > 100
    file = tmp_path / "results.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 4 and {json.loads(line)["mixer"] for line in lines} == {"dense", "free"}
    file.write_text("".join(lines)[:-10])  # cut off in the middle of the last record
    assert flow.main(arguments) == 0
    again = file.read_text().splitlines(keepends=True)
    assert again[:3] == lines[:3] and json.loads(again[3]) == json.loads(lines[3])


def test_one_seed_chooses_the_setting_and_others_judge_it(flow):
    def record(lr, seed, validation, test):
        setting = {"task": "table", "mixer": "dense", "start": "rotation", "lr": lr, "seed": seed, "steps": 1}
        return setting | {"validation": validation, "test": test}

    records = [record(0.1, 0, 3.0, 1.0), record(0.2, 0, 2.0, 9.0), record(0.3, 0, None, None)]
    winner = flow.best(records, task="table")
    assert winner.chosen["lr"] == 0.2 and str(winner) == "9.000"
    winner = flow.best([*records, record(0.2, 1, 4.0, 11.0), record(0.2, 2, 4.0, 13.0)])
    assert winner.chosen["lr"] == 0.2 and str(winner) == "12.00 ± 1.4"  # of the seeds that did not choose it
    assert str(flow.best(records[-1:])) == "diverged" and flow.best(records, task="images") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--steps", "0"], "--steps should be at least 1; got 0"), (["--mixers", "QZ"], "invalid choice: 'QZ'")],
)
def test_wrong_arguments(flow, arguments, message, capsys):
    with pytest.raises(SystemExit):
        flow.main(arguments)
    assert message in capsys.readouterr().err
