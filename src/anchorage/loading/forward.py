"""The first forward pass of a model whose tensors have just been loaded: there a mapped file is truly read.

The model is built without memory for its weights, as transformers does it: parameters on the meta device, which
the loaded tensors then replace. Buffers that no file holds (rotary frequencies, say) are computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from anchorage.errors import MeasurementError
from anchorage.loading.subject import Subject

N_TOKENS = 64


def first_forward(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Tensor:
    """Give a model its tensors and run one row of 64 token ids. This is what is timed.

    Args:
        model: of :func:`build_empty`: building it does not depend on how its tensors were loaded.
        tensors: all of the model's, tied ones once, on the CPU. They are not copied, and may be read-only.

    Returns:
        The row's logits, ``[1, 64, vocabulary]``.

    Raises:
        MeasurementError: the tensors are not the model's.
    """
    assign_tensors(model, tensors)
    return run_row(model)


def find_model_module(folder: str) -> str:
    """Name of the module that defines the class of a folder's model. transformers imports it when a model is built."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__


def build_empty(subject: Subject, dtype: torch.dtype) -> PreTrainedModel:
    """The subject's model, from its ``config.json``, in eval mode: parameters on the meta device, buffers real."""
    assert subject.model
    config = AutoConfig.from_pretrained(subject.model, trust_remote_code=False, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return model.eval()


def assign_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Make the tensors the model's own, without a copy, and tie those that are kept once.

    Raises:
        MeasurementError: some are missing, or belong to no such model.
    """
    unexpected = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if missing or unexpected:
        raise MeasurementError(
            f"the tensors are not the model's: {len(missing)} are missing ({', '.join(missing[:3])}), "
            f"{len(unexpected)} unknown ({', '.join(unexpected[:3])}). Delete the run's folder loading, and run the "
            "plain command again"
        )


def run_row(model: PreTrainedModel) -> Tensor:
    """Logits ``[1, 64, vocabulary]`` of one row of 64 token ids: 0 to 63, from 0 again where the vocabulary ends."""
    ids = torch.arange(N_TOKENS)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits
