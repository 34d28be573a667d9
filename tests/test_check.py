"""``fasth check``: right answers pass, wrong ones are named, and the report holds what it promises."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from processes import forked
from torch import Tensor

from fasth import LinearSVD, functional
from fasth.tools import check
from fasth.tools.cli import main
from fasth.tools.twins import definition_linear, definition_weight

SMALL = ("table: ragged", "table: batch of V,", "d = 64, 7 rows", "V times", "orthogonality, d = 64")


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(out, *arguments: str) -> int:
    return main(["check", "--out", str(out), *arguments])


def report(out):
    return json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"JSON has no {name}"))


def test_all_kinds_of_checks_pass(device):
    chosen = [one for one in check.checks(device) if any(words in one.name for words in SMALL)]
    records = [check.perform(one) for one in chosen]
    assert [record for record in records if record["status"] != "passed"] == []
    assert all(0 <= record["error"] <= record["tolerance"] for record in records)


def test_the_list_has_every_form_direction_dtype_and_layer():
    names = [one.name for one in check.checks("cpu")]
    assert len(set(names)) == len(names) > 1000
    for words in (*check.FORMS, *check.DTYPES, *check.LAYERS, "transpose", "bias", "1e+30", "1e-30", "d = 2048"):
        assert any(words in name for name in names), words
    assert not any("float16" in name for name in (one.name for one in check.checks("cpu", ["float32"])))


def test_the_report(tmp_path, capsys):
    out = tmp_path / "folder" / "report.json"
    assert run(out, "--dtype", "float32", "float64", "--only", "table: ragged") == 0
    found = report(out)
    assert (found["passed"], found["failed"], found["interrupted"]) == (12, 0, False)
    assert found["environment"]["device"] == "cpu" and found["environment"]["versions"]["torch"] == torch.__version__
    assert len(found["checks"]) == 12
    for record in found["checks"]:
        assert record["name"].startswith("table: ragged last block, ") and record["status"] == "passed"
        assert 0 <= record["error"] <= record["tolerance"] and record["seconds"] >= 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-2:] == [
        "12 checks passed, 0 failed",
        f"Written to {out}: send this file with a report",
    ]
    assert printed.err == ""  # it is no terminal


def test_the_report_is_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--only", "table: square, full, float32"]) == 0
    assert len(report(tmp_path / "fasth-check.json")["checks"]) == 1


def slightly_off(x: Tensor, V: Tensor, **options: object) -> Tensor:
    return functional.householder(x, V, **options) * (1 + 1e-3)


def wrong_gradient(x: Tensor, V: Tensor, **options: object) -> Tensor:
    return functional.householder(x, V.detach(), **options) + 0 * V.sum()


def not_a_number(x: Tensor, V: Tensor, **options: object) -> Tensor:
    return functional.householder(x, V, **options) * math.nan


def too_many_rows(x: Tensor, V: Tensor, **options: object) -> Tensor:
    return torch.cat([functional.householder(x, V, **options)] * 2)


def raising(x: Tensor, V: Tensor, **options: object) -> Tensor:
    raise RuntimeError("no kernel\nfor this GPU")


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (slightly_off, "value: error "),
        (wrong_gradient, "gradient of V: error "),
        (not_a_number, "value: error nan, tolerance "),
        (too_many_rows, "shape (12, 11), not (6, 11)"),
        (raising, "RuntimeError: no kernel"),
    ],
)
def test_a_wrong_backend_is_named(tmp_path, monkeypatch, capsys, backend, words):
    monkeypatch.setattr(check, "householder", backend)
    out = tmp_path / "report.json"
    assert run(out, "--dtype", "float32", "--only", "ragged last block") == 1
    found = report(out)
    assert (found["passed"], found["failed"]) == (2, 4)  # compact reflectors go by `reflect`
    failed = [record for record in found["checks"] if record["status"] == "failed"]
    assert all(words in record["message"] for record in failed)
    assert ("traceback" in failed[0]) == (backend in (too_many_rows, raising))
    printed = capsys.readouterr().out
    for record in failed:
        assert f"failed: {record['name']}: {record['message']}\n" in printed
    assert "2 checks passed, 4 failed\n" in printed


@pytest.mark.parametrize("stored", check.DTYPES)
def test_a_wrong_layer_is_named(tmp_path, monkeypatch, stored):
    multiply = LinearSVD._multiply
    monkeypatch.setattr(LinearSVD, "_multiply", lambda self, x, sigma: multiply(self, x, sigma) * 1.1)
    out = tmp_path / "report.json"
    assert run(out, "--dtype", stored, "--only", "d = 64, 7 rows, bias") == 1
    failed = [record["name"] for record in report(out)["checks"] if record["status"] == "failed"]
    assert failed == [
        f"{kind}, d = 64, 7 rows, bias, {stored}" for kind in check.LAYERS if kind.startswith("LinearSVD")
    ]


def test_what_is_not_orthogonal_is_named(monkeypatch):
    one = next(one for one in check.checks("cpu", ["float32"]) if one.name.startswith("orthogonality"))
    assert check.perform(one)["status"] == "passed"
    monkeypatch.setattr(check, "ORTHOGONALITY", 0.0)
    assert check.perform(one)["status"] == "failed"


def test_an_interruption_leaves_what_was_done(tmp_path, monkeypatch, capsys):
    perform, done = check.perform, []

    def interrupted(one):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(one.name)
        return perform(one)

    monkeypatch.setattr(check, "perform", interrupted)
    out = tmp_path / "report.json"
    assert run(out, "--only", "table: square") == 130
    found = report(out)
    assert found["interrupted"] and [record["name"] for record in found["checks"]] == done
    assert "Interrupted after 2 of 24 checks\n2 checks passed, 0 failed\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nonsense", "meta", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_is_not_there(tmp_path, name):
    done = forked("-m", "fasth", "check", "--device", name, "--out", str(tmp_path / "report.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fasth: ") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_done_is_said_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file" / "report.json") == 2
    assert run(tmp_path / "report.json", "--only", "nothing like it") == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "contains 'nothing like it'" in printed.err


def test_threads(tmp_path, capsys):
    for arguments, threads in (([], 1), (["--threads", "2"], 2)):
        assert run(tmp_path / "report.json", "--only", "table: square, full, float32", *arguments) == 0
        assert report(tmp_path / "report.json")["environment"]["threads"] == threads
    assert run(tmp_path / "report.json", "--threads", "0") == 2
    assert "--threads should be positive; got 0" in capsys.readouterr().err


def test_progress_is_for_terminals(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run(tmp_path / "report.json", "--only", "table: square, full, float32") == 0
    assert "[0/1] table: square, full, float32" in capsys.readouterr().err


def test_other_commands_do_not_load_it():
    code = "import sys; from fasth.tools.cli import main; main([]); sys.exit('fasth.tools.check' in sys.modules)"
    assert forked("-c", code).returncode == 0


def test_dtypes_that_a_device_has():
    assert check.usable("cpu", check.DTYPES) == list(check.DTYPES)
    assert check.usable("meta", check.DTYPES) == []


def test_the_numbers_drawn_are_those_of_every_dtype():
    t = check._rounded(torch.randn(100_000, dtype=torch.float64) * torch.logspace(-6, 2, 100_000))
    for dtype in functional.DTYPES:
        assert torch.equal(t.to(dtype).double(), t)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", check.LAYERS)
def test_rows_by_the_definition_are_those_of_the_dense_twin(kind, bias):
    layer, x, _, expected = check._layer(kind, 9, 4, bias)
    with torch.no_grad():
        dense = F.linear(x, definition_weight(layer), layer.bias)
        torch.testing.assert_close(definition_linear(layer, x), dense)
    torch.testing.assert_close(expected[0], dense)
