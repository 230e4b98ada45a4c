"""Builders of tiny causal language models of many architectures, with random weights, and of whole model folders.

Each has blocks that differ from one another, a width of 16 and a vocabulary of 96, and runs in milliseconds. Nothing is
downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from anchorage.model import resolve_model
from anchorage.settings import ModelSettings

VOCAB_SIZE = 96
WIDTH = 16
N_LAYERS = 3

_NO_SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    **_NO_SPECIAL,
}
_MLP = {**_PLAIN, "intermediate_size": 32}
_GROUPED = {**_MLP, "num_key_value_heads": 1}
_HEAD_DIM = {**_GROUPED, "head_dim": 8}
_GPT = {"vocab_size": VOCAB_SIZE, "n_embd": WIDTH, "n_layer": N_LAYERS, "n_head": 2, "n_positions": 128, **_NO_SPECIAL}

# model_type -> configuration. The first eleven are the ones the issue names; the others widen the range of shapes.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": _GPT,
    "llama": _GROUPED,
    "gpt_neox": _MLP,
    "opt": {**_PLAIN, "ffn_dim": 32, "word_embed_proj_dim": WIDTH, "pad_token_id": 1},
    "qwen2": _GROUPED,
    "qwen3": _HEAD_DIM,
    "gemma": _HEAD_DIM,
    "gemma2": _HEAD_DIM,
    "gemma3_text": _HEAD_DIM,
    "mistral": _GROUPED,
    "phi": _MLP,
    "bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "n_layer": N_LAYERS, "n_head": 2, **_NO_SPECIAL},
    "falcon": {**_PLAIN, "max_position_embeddings": 128},
    "gptj": {**_GPT, "rotary_dim": 4},
    "mixtral": {**_GROUPED, "num_local_experts": 2},
}
KINDS = tuple(CONFIGS)

# model_type -> path of the blocks in the whole model, attention, feed-forward: written by hand, to check ours with.
PLACES = {
    "gpt2": ("transformer.h", "attn", "mlp"),
    "gptj": ("transformer.h", "attn", "mlp"),
    "gpt_neox": ("gpt_neox.layers", "attention", "mlp"),
    "opt": ("model.decoder.layers", "self_attn", "fc2"),
    "bloom": ("transformer.h", "self_attention", "mlp"),
    "falcon": ("transformer.h", "self_attention", "mlp"),
}
LLAMA_LIKE = ("model.layers", "self_attn", "mlp")

_SENTENCES = [
    "The Eiffel Tower is in the city of Paris.",
    "A ship at anchor rides out the storm; a cache at anchor rides out the crash.",
    "What is stored equals what the model computes, and a re-check says so.",
]


def tiny_model(kind: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a random causal language model in eval mode.

    Args:
        kind: a key of CONFIGS.
        seed: of the weights.
        overrides: configuration values, by the names of that architecture.
    """
    config = AutoConfig.for_model(kind, **{**CONFIGS[kind], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Fresh norms are all ones and biases all zeros: a mistake in either would not show.
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def place_of(kind: str, site: str) -> str:
    """The module path, in the whole model, of a stable site's module."""
    blocks, attn, mlp = PLACES.get(kind, LLAMA_LIKE)
    name, _, index = site.partition(".")
    part = {"attn": f".{attn}", "mlp": f".{mlp}"}.get(name, "")
    return f"{blocks}.{index or 0}{part}"


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE, **settings: Any) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on three sentences; ``<s>`` is 0 and ``</s>`` is 1.

    Its alphabet is the bytes that the sentences hold, so that the vocabulary stays small; other bytes give no token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **settings)


def save_tiny(folder: Path, kind: str = "gpt2", *, vocab: int = VOCAB_SIZE, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny model with its tokenizer as a complete local model folder, and return the folder.

    Args:
        folder: made where missing.
        kind: a key of CONFIGS.
        vocab: vocabulary size of the model, 96 or more; the tokenizer's is no larger.
        seed: of the weights.
        overrides: configuration values, by the names of that architecture.
    """
    tiny_model(kind, seed=seed, vocab_size=vocab, **overrides).save_pretrained(folder)
    tiny_tokenizer(min(vocab, VOCAB_SIZE)).save_pretrained(folder)
    return folder


def settings_of(folder: Path, **values: Any) -> ModelSettings:
    """The configuration's section ``model`` for a local folder, on the CPU."""
    return ModelSettings(source=str(folder), device="cpu", **values)


def resolve_tiny(folder: Path, *, threads: int | str = 1, n_cores: int = 1, **values: Any) -> dict[str, Any]:
    """The content of ``model.json`` for a local folder."""
    return resolve_model(settings_of(folder, **values), threads=threads, n_cores=n_cores)


def flip_bit(path: Path, offset: int) -> None:
    """Flip the lowest bit of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
