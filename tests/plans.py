"""Plans of tiny captures: a random model, a small corpus, a configuration, brought together without the workflow."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from anchorage.capture import capture_part
from anchorage.corpus import build_corpus
from anchorage.model import load_tokenizer, resolve_model
from anchorage.plan import Plan
from anchorage.settings import load_settings
from anchorage.store.manifest import gather_parts
from anchorage.store.names import MANIFEST, published_part
from anchorage.store.reader import Cache, open_cache
from tiny_models import save_tiny
from workflows import write_corpus

ROOT = Path(__file__).parents[1]
CONFIG = yaml.safe_load((ROOT / "config/test.yaml").read_text())


def build_plan(root: Path, *, kind: str = "llama", weights: dict[str, Any] | None = None, **changes: Any) -> Plan:
    """A plan below a folder; changes are sections of the configuration to be updated."""
    model, text = root / "model", root / "text.jsonl"
    if not model.exists():
        save_tiny(model, kind, **(weights or {}))
        write_corpus(text)
    config = copy.deepcopy(CONFIG)
    config["model"]["source"], config["corpus"]["source"] = str(model), str(text)
    config["capture"]["staging_dir"] = str(root / "staging")
    for section, values in changes.items():
        config[section] |= values
    settings = load_settings(config)
    facts = resolve_model(settings.model, threads=settings.capture.threads, n_cores=1)
    corpus = settings.corpus
    tokens = root / f"tokens-{corpus.layout}-{corpus.rows}x{corpus.seq_len}.safetensors"
    if not tokens.exists():
        build_corpus(
            corpus,
            load_tokenizer(facts),
            tokens_path=tokens,
            vocab_size=facts["architecture"]["vocab_size"],
            log=lambda line: None,
        )
    return Plan(settings, facts, tokens)


def capture(plan: Plan, cache: Path, log: list[str] | None = None) -> Cache:
    """Capture all parts, gather, open."""
    lines = [] if log is None else log
    parts = [cache / published_part(part) for part in plan.layout.parts]
    for part, path in enumerate(parts):
        capture_part(plan, part, part_path=path, log=lines.append)
    gather_parts(parts, cache, cache / MANIFEST)
    return open_cache(cache)


def raw_hidden_states(plan: Plan) -> dict[str, torch.Tensor]:
    """Every stable site of the whole corpus by raw hooks on the transformers model, batch by batch: the oracle.

    For models of Llama's form, in float32: ``{site: [rows, seq_len, width]}``.
    """
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(plan.settings.model.source, dtype=torch.float32).eval().model
    found: dict[str, list[torch.Tensor]] = {}

    def keep(name):
        def hook(module, args, output):
            value = output[0] if isinstance(output, tuple) else output
            found.setdefault(name, []).append(value.detach().clone())

        return hook

    model.layers[0].register_forward_pre_hook(lambda m, args: found.setdefault("embed", []).append(args[0].clone()))
    for i, layer in enumerate(model.layers):
        layer.self_attn.register_forward_hook(keep(f"attn.{i}"))
        layer.mlp.register_forward_hook(keep(f"mlp.{i}"))
        layer.register_forward_hook(keep(f"block.{i}"))
    step = plan.settings.capture.batch_rows
    with torch.no_grad():
        for start in range(0, plan.layout.n_rows, step):
            ids = plan.corpus.rows(start, min(start + step, plan.layout.n_rows)).astype(np.int64)
            model(input_ids=torch.from_numpy(ids), use_cache=False)
    return {name: torch.cat(values) for name, values in found.items()}
