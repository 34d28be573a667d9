"""Architectures of transformers, timm and torchvision, small and with random weights."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Architecture(NamedTuple):
    library: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]  # the arguments of forward, in float64 where they are real

    def __str__(self) -> str:
        return f"{self.library}/{self.name}"


def words(**more: int) -> dict[str, Tensor]:
    """Tokens, for a language model; ``more`` says how many for other arguments."""
    lengths = {"input_ids": 12, **more}
    return {name: torch.randint(3, 60, (2, length)) for name, length in lengths.items()}


def pixels(size: int = 32, name: str = "pixel_values") -> dict[str, Tensor]:
    return {name: torch.randn(2, 3, size, size, dtype=torch.float64)}


def transformer(name: str, config: str, **options: Any) -> nn.Module:
    """The model of this class, of this configuration."""
    import transformers

    set_up = getattr(transformers, config)(**options)
    set_up._attn_implementation = "eager"
    set_up._experts_implementation = "eager"  # the other one takes no float64
    return getattr(transformers, name)(set_up)


TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
VISION = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}

# The model's class, its configuration's class, the configuration's arguments, and the model's inputs.
OF_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", TEXT, words),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", TEXT, words),
    "distilbert": (
        "DistilBertForTokenClassification",
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        words,
    ),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 16}, words),
    "electra": ("ElectraForPreTraining", "ElectraConfig", {**TEXT, "embedding_size": 16}, words),
    "deberta-v2": (
        "DebertaV2Model",
        "DebertaV2Config",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        words,
    ),
    "xlnet": (
        "XLNetModel",
        "XLNetConfig",
        {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        words,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "tie_word_embeddings": False, **ENDS},
        words,
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, words),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, **ENDS},
        words,
    ),
    "opt": ("OPTForCausalLM", "OPTConfig", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 16}, words),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4, **ENDS},
        words,
    ),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**TEXT, "tie_word_embeddings": False}, words),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GQA, words),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GQA, "num_local_experts": 4}, words),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GQA, words),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GQA, words),
    "phi": ("PhiForCausalLM", "PhiConfig", TEXT, words),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, **ENDS},
        words,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        functools.partial(words, decoder_input_ids=7),
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": 64,
            "d_model": 32,
            "max_position_embeddings": 64,
            **{
                f"{side}_{name}": n
                for side in ("encoder", "decoder")
                for name, n in (("layers", 2), ("ffn_dim", 48), ("attention_heads", 4))
            },
            **ENDS,
        },
        functools.partial(words, decoder_input_ids=7),
    ),
    "whisper": (
        "WhisperModel",
        "WhisperConfig",
        {
            "vocab_size": 64,
            "num_mel_bins": 8,
            "d_model": 32,
            "max_source_positions": 16,
            "max_target_positions": 16,
            **{
                f"{side}_{name}": n
                for side in ("encoder", "decoder")
                for name, n in (("layers", 2), ("ffn_dim", 48), ("attention_heads", 4))
            },
            "decoder_start_token_id": 1,
            **ENDS,
        },
        lambda: {
            "input_features": torch.randn(2, 8, 32, dtype=torch.float64),
            "decoder_input_ids": torch.randint(3, 60, (2, 7)),
        },
    ),
    "wav2vec2": (
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {
            **TEXT,
            "conv_dim": [16, 16],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
        },
        lambda: {"input_values": torch.randn(2, 400, dtype=torch.float64)},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION, pixels),
    "swin": (
        "SwinModel",
        "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
        pixels,
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {**STAGES, "num_attention_heads": [1, 2, 4, 4], "decoder_hidden_size": 16},
        functools.partial(pixels, 64),
    ),
}


def of_timm(name: str, **options: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, num_classes=10, **options)
    return model


def of_class(path: str, **options: Any) -> nn.Module:
    """A model of timm whose sizes are fixed by ``create_model``."""
    module, _, name = path.rpartition(".")
    model: nn.Module = getattr(importlib.import_module(f"timm.models.{module}"), name)(num_classes=10, **options)
    return model


SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}

OF_TIMM: dict[str, tuple[str, int, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", 32, SMALL_VIT),
    "vit, relative positions": ("test_vit_relpos", 160, {}),
    "deit3": ("deit3_small_patch16_224", 32, SMALL_VIT),
    "beit": ("beit_base_patch16_224", 32, SMALL_VIT),
    "eva02": ("eva02_tiny_patch14_224", 32, SMALL_VIT),
    "cait": ("cait_xxs24_224", 32, {**SMALL_VIT, "depth_token_only": 1}),
    "xcit": ("xcit_nano_12_p16_224", 32, {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4}),
    "mixer": ("mlp_mixer.MlpMixer", 32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}),
    "convmixer": ("convmixer.ConvMixer", 32, {"dim": 32, "depth": 2}),
    "mobilenet-v3": ("mobilenetv3_small_050", 64, {}),
    "levit": (
        "levit_128s",
        64,
        {"img_size": 64, "embed_dim": (16, 24, 32), "num_heads": (2, 2, 2), "key_dim": 8, "depth": (1, 1, 1)},
    ),
    "maxvit": ("test_maxvit", 160, {}),
    "convnext": ("test_convnext", 64, {}),
    "efficientnet": ("test_efficientnet", 64, {}),
    "nfnet": ("test_nfnet", 64, {}),
    "byobnet, groups": ("test_byobnet", 64, {}),
    "mambaout": ("test_mambaout", 64, {}),
    "resnet, squeeze and excitation": ("test_resnet", 64, {}),
}


def small(make: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
    """Imports torchvision's models when they are made."""

    def imported() -> nn.Module:
        from torchvision import models

        return make(models)

    return imported


def _convnext(models: Any) -> nn.Module:
    block = models.convnext.CNBlockConfig
    return models.ConvNeXt([block(8, 16, 1), block(16, 24, 1), block(24, None, 1)], num_classes=10)


def _regnet(models: Any) -> nn.Module:
    blocks = models.regnet.BlockParams.from_init_params(depth=6, w_0=16, w_a=8.0, w_m=2.0, group_width=8)
    return models.RegNet(blocks, num_classes=10, stem_width=8)


OF_TORCHVISION: dict[str, tuple[Callable[[Any], nn.Module], int]] = {
    "resnet": (lambda m: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10), 32),
    "regnet, groups": (_regnet, 64),
    "mnasnet": (lambda m: m.MNASNet(0.25, num_classes=10), 64),
    "squeezenet": (lambda m: m.squeezenet1_1(num_classes=10), 64),
    "densenet": (lambda m: m.DenseNet(8, (2, 2, 2), 16, num_classes=10), 64),
    "mobilenet-v2": (lambda m: m.mobilenet_v2(width_mult=0.25, num_classes=10), 64),
    "shufflenet-v2": (lambda m: m.ShuffleNetV2([1, 1, 1], [8, 16, 24, 32, 48], num_classes=10), 64),
    "vit, nn.MultiheadAttention": (
        lambda m: m.VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=10),
        32,
    ),
    "swin": (lambda m: m.SwinTransformer([2, 2], 16, [1, 1], [2, 4], [4, 4], num_classes=10), 32),
    "convnext": (_convnext, 64),
}

ARCHITECTURES = [
    *(
        Architecture("transformers", name, functools.partial(transformer, model, config, **options), inputs)
        for name, (model, config, options, inputs) in OF_TRANSFORMERS.items()
    ),
    *(
        Architecture(
            "timm",
            name,
            functools.partial(of_class if "." in model else of_timm, model, **options),
            functools.partial(pixels, size, "x"),
        )
        for name, (model, size, options) in OF_TIMM.items()
    ),
    *(
        Architecture("torchvision", name, small(make), functools.partial(pixels, size, "x"))
        for name, (make, size) in OF_TORCHVISION.items()
    ),
]
