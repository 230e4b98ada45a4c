"""A model of the same shape with weights drawn at random: the control of every probe on a trained one.

What a probe finds there is in the architecture and the text, not in what was learnt.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from anchorage import durable
from anchorage.digest import sha256_file
from anchorage.resources import workshop

_SEED = 0


def make_random_model(source: Path, target: Path, *, log: Callable[[str], None]) -> None:
    """Write a folder like a model's, with its configuration and tokenizer and freshly initialised weights.

    Args:
        source: a folder that ``from_pretrained`` opens.
        target: the folder to make. Initialisation is transformers' own for the architecture, from a fixed seed.
        log: is handed a line at each step.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with workshop(target) as work:
        ready = work / "ready"
        ready.mkdir()
        config = AutoConfig.from_pretrained(source)
        log(f"drawing the weights of {config.architectures[0]} at random, seed {_SEED}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(ready)
        for file in source.iterdir():
            if not (ready / file.name).exists() and file.suffix != ".safetensors":
                shutil.copyfile(file, ready / file.name)
        origin = {
            "made_from": source.name,
            "source_weights_sha256": sha256_file(source / "model.safetensors"),
            "seed": _SEED,
            "made_with": {"torch": torch.__version__},
            "note": "Weights drawn at random: nothing was learnt. Configuration and tokenizer are the source's.",
        }
        durable.write_json(ready / "ORIGIN.json", origin)
        durable.publish_folder(ready, target)
    log(f"model written to {target}")
