"""The trunk, its blocks and their parts are found in many architectures; what cannot be read is refused.

Method: tiny models against a table of paths written by hand (PLACES).
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anchorage.architecture import find_trunk
from anchorage.errors import SiteError
from tiny_models import KINDS, LLAMA_LIKE, N_LAYERS, PLACES, VOCAB_SIZE, WIDTH, tiny_model


@pytest.mark.parametrize("kind", KINDS)
def test_the_trunk_is_the_model_without_its_head(kind):
    trunk = find_trunk(tiny_model(kind))
    blocks, attn, mlp = PLACES.get(kind, LLAMA_LIKE)
    assert f"{trunk.prefix}.{trunk.layers_path}" == blocks
    assert (trunk.attn_name, trunk.mlp_name, trunk.n_layers) == (attn, mlp, N_LAYERS)
    assert trunk.outside == {"lm_head"}


def test_an_architecture_without_attention_is_refused_by_its_class():
    config = AutoConfig.for_model("mamba", vocab_size=VOCAB_SIZE, hidden_size=WIDTH, num_hidden_layers=N_LAYERS)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(SiteError, match="MambaForCausalLM is not supported"):
        find_trunk(model)


def test_a_vision_tower_of_as_many_layers_is_not_taken_for_the_blocks():
    text = {"vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "num_hidden_layers": N_LAYERS, "num_attention_heads": 2}
    vision = {"num_hidden_layers": N_LAYERS, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**text, "intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8},
        vision_config=vision,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    trunk = find_trunk(model)
    assert (trunk.prefix, trunk.layers_path) == ("model", "language_model.layers")
