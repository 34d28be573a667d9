"""Programs of other libraries on converted models: PEFT's merging, transformers' and timm's optimizers and checkpoints.

They run where the library is installed; ``make zoo`` installs all of them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo.libraries import define_operators_of_torchvision, missing

import fasth
from fasth.convert import Conversion

pytestmark = pytest.mark.filterwarnings("ignore")


def library(name: str) -> Any:
    if missing((name,)):
        pytest.skip(f"{name} is not installed; `make zoo` installs it")
    define_operators_of_torchvision()
    return pytest.importorskip(name)


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    """The model with adapters of random weights on layer 0."""
    peft = library("peft")
    setup = peft.LoraConfig(target_modules=["0"], init_lora_weights=False, r=4, **options)
    setup._register_custom_module({fasth.LinearSVD: peft.tuners.lora.Linear})
    found: nn.Module = peft.get_peft_model(model, setup)
    return found


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def merge_and_unload(model: Any) -> Any:
    return model.merge_and_unload()


def safely(model: Any) -> Any:
    return model.merge_and_unload(safe_merge=True)


def in_place(model: Any) -> Any:
    model.merge_adapter()
    return model


def safely_in_place(model: Any) -> Any:
    model.merge_adapter(safe_merge=True)
    return model


def and_back(model: Any) -> Any:
    model.merge_adapter()
    model.unmerge_adapter()
    return model


Merge = Callable[[Any], Any]
each_merge = pytest.mark.parametrize("merge", [merge_and_unload, safely, in_place, safely_in_place, and_back])
X = torch.linspace(-2, 2, 24, dtype=torch.float64).view(3, 8)


def off(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@each_merge
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}], ids=["lora", "dora", "bias"])
def test_to_svd_leaves_the_layers_of_adapters_alone(merge: Merge, options: dict[str, Any]) -> None:
    model = adapted(plain(), **options)
    expected = model(X)
    for convert in (
        fasth.to_svd,
        lambda model, report: fasth.compress(model, energy=1.0, trainable=True, report=report),
    ):
        report: list[Conversion] = []
        svd = convert(model, report=report)
        left = {c.name for c in report if c.after is None and "lora.layer.Linear" in c.reason}
        assert {name.rpartition("model.0.")[2] for name in left} >= {"base_layer", "lora_A.default", "lora_B.default"}
        assert isinstance(svd.get_submodule("base_model.model.2"), fasth.LinearSVD)
        assert off(svd(X), expected) < 1e-12
        assert off(merge(svd)(X), expected) < 1e-12


@each_merge
def test_to_dense_makes_an_adapter_on_svds_mergeable(merge: Merge) -> None:
    model = adapted(fasth.to_svd(plain()))
    expected = model(X)
    assert off(merge(fasth.to_dense(model))(X), expected) < 1e-12


def registered() -> nn.Module:
    return adapted(fasth.to_svd(plain()))


def converted_by_hand() -> nn.Module:
    model: Any = adapted(plain())
    layer = model.base_model.model[0]
    layer.base_layer = fasth.LinearSVD.from_linear(layer.base_layer)
    found: nn.Module = model
    return found


@pytest.mark.parametrize("merge", [merge_and_unload, safely, in_place, safely_in_place])
@pytest.mark.parametrize("make", [registered, converted_by_hand])
def test_a_merge_into_an_svd_is_right_or_raises(make: Callable[[], nn.Module], merge: Merge) -> None:
    """A merge writes into the weight, which the layer computes: it should raise an error, or be right."""
    model = make()
    expected = model(X)
    try:
        merged = merge(model)(X)
    except Exception as error:
        assert "weight" in str(error)
    else:
        assert off(merged, expected) < 1e-12


def test_peft_refuses_an_svd_that_nobody_registered() -> None:
    peft = library("peft")
    with pytest.raises(ValueError, match="LinearSVD"):
        peft.get_peft_model(fasth.to_svd(plain()), peft.LoraConfig(target_modules=["0"]))


def language_model(**options: Any) -> Any:
    transformers = library("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, bos_token_id=1, eos_token_id=2, **sizes, **options)
    return transformers.LlamaForCausalLM(config).eval()


TOKENS = torch.arange(3, 15)[None]


def test_a_head_that_was_left_alone_or_resized_before_is_taken() -> None:
    model = language_model()
    with pytest.raises(TypeError, match=r"LinearSVD.*not an instance of"):
        fasth.to_svd(model).resize_token_embeddings(70)
    svd = fasth.to_svd(model, exclude="lm_head")
    svd.resize_token_embeddings(70)
    assert svd(TOKENS).logits.shape[-1] == 70
    model.resize_token_embeddings(70)
    assert off(fasth.to_svd(model)(TOKENS).logits, model(TOKENS).logits) < 1e-4


def test_gpt2_is_converted_and_comes_back() -> None:
    transformers = library("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    report: list[Conversion] = []
    svd = fasth.to_svd(model, report=report)
    assert [c.name.rpartition("h.0.")[2] for c in report if c.before == "Conv1D" and c.after is not None] == [
        "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj",
    ]  # fmt: skip
    assert off(svd(TOKENS).logits, model(TOKENS).logits) < 1e-4
    svd(TOKENS, labels=TOKENS).loss.backward()
    dense = fasth.to_dense(svd)
    assert list(dense.state_dict()) == list(model.state_dict())
    assert off(dense(TOKENS).logits, model(TOKENS).logits) < 1e-4


def test_a_tied_head_is_left_alone_and_stays_tied() -> None:
    svd = fasth.to_svd(language_model(tie_word_embeddings=True), report=[])
    svd.resize_token_embeddings(70)
    assert svd.lm_head.weight is svd.get_input_embeddings().weight


def test_a_saved_model_is_read_if_it_was_dense(tmp_path: Path) -> None:
    svd = fasth.to_svd(language_model())
    fasth.to_dense(svd).save_pretrained(tmp_path / "dense")
    again = type(svd).from_pretrained(tmp_path / "dense")
    assert off(again(TOKENS).logits, svd(TOKENS).logits) < 1e-4


def test_transformers_reports_the_weights_that_it_does_not_find(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    svd = fasth.to_svd(language_model())
    svd.save_pretrained(tmp_path)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        type(svd).from_pretrained(tmp_path)
    finally:
        logger.removeHandler(caplog.handler)
    assert "MISSING" in caplog.text and "lm_head.reflectors" in caplog.text


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": TOKENS[0] + i, "labels": TOKENS[0] + i}


def trainer(model: Any, folder: Path, own: bool) -> Any:
    transformers = library("transformers")
    library("accelerate")
    settings = transformers.TrainingArguments(
        str(folder), learning_rate=1e-3, weight_decay=0.1, max_steps=4, save_steps=2, use_cpu=True, report_to=[]
    )
    groups = fasth.param_groups(model, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    optimizers = (torch.optim.AdamW(groups) if own else None, None)
    return transformers.Trainer(model, settings, train_dataset=Counting(), optimizers=optimizers)


def decay_of_reflectors(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if names[parameter].endswith("reflectors")
    }


def test_trainer_takes_our_groups_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    svd = fasth.to_svd(language_model())
    start = copy.deepcopy(svd)
    first = trainer(svd, tmp_path, own=True)
    first.train()
    assert decay_of_reflectors(svd, first.optimizer.optimizer) == {0.0}
    rates = {group["name"]: group["initial_lr"] for group in first.optimizer.param_groups}
    assert rates["vectors"] == 1e-3 < rates["reflectors"] < rates["sigma"]  # the schedule scales what the groups have
    trainer(start, tmp_path, own=True).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for ours, theirs in zip(start.parameters(), svd.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_trainer_by_itself_decays_reflectors(tmp_path: Path) -> None:
    """Checks the warning in docs/ecosystem.md: once this fails, that page can be shorter."""
    svd = fasth.to_svd(language_model())
    assert decay_of_reflectors(svd, trainer(svd, tmp_path, own=False).create_optimizer()) == {0.1}


def test_timm_takes_our_groups() -> None:
    library("timm")
    from timm.models import create_model
    from timm.optim import create_optimizer_v2

    model = fasth.to_svd(create_model("test_vit", num_classes=10), report=[])
    for name, kind in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
        groups = fasth.param_groups(model, lr=1e-3, weight_decay=0.05, optimizer=kind)
        expected = [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
        optimizer = create_optimizer_v2(groups, opt=name, lr=1e-3)
        assert isinstance(optimizer, kind)
        assert [(g["name"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == expected
    by_itself = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    assert decay_of_reflectors(model, by_itself) == {0.05}


def test_timm_reparameterizes_a_converted_model() -> None:
    """timm reads the weights of branches and combines them into one convolution."""
    library("timm")
    from timm.models import create_model
    from timm.utils import reparameterize_model

    model = create_model("repvgg_a0", num_classes=10).double().eval()
    svd = fasth.to_svd(model, filter=lambda name, _: name.startswith("stages.0"), report=[])
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    assert off(reparameterize_model(svd)(x), model(x)) < 1e-9
