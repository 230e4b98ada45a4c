"""The model and its tokenizer: found, described once with their digests, and loaded only while they are still the same.

What is described goes to ``results/{run}/model.json``. Weights are read from safetensors files only, and no code that
comes with a model is ever run.
"""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from anchorage.architecture import Trunk, find_trunk
from anchorage.errors import AnchorageError, IntegrityError, ModelError
from anchorage.model_files import digest_config, digest_tokenizer, digest_weights, find_model_folder
from anchorage.processors import available_processors
from anchorage.settings import ModelSettings

_DIGESTS: dict[str, Callable[[Path], str]] = {
    "weights_digest": digest_weights,
    "config_digest": digest_config,
    "tokenizer_digest": digest_tokenizer,
}
_VERSIONS = ("anchorage", "torch", "transformers", "nnsight", "tokenizers")


def resolve_model(settings: ModelSettings, *, threads: Literal["auto"] | int, n_cores: int) -> dict[str, Any]:
    """Find out what the configured model is, without reading its weights into memory.

    Args:
        settings: section ``model`` of the configuration.
        threads: CPU threads of a forward pass; auto is the smaller of n_cores and the processors at hand.
        n_cores: what Snakemake gave the job.

    Returns:
        The content of ``model.json``: plain JSON.

    Raises:
        ModelError: the model or its tokenizer cannot be found or read.
        SiteError: the architecture is not supported.
    """
    folder, commit = find_model_folder(settings.source, settings.revision)
    architecture = _inspect_architecture(folder, settings)
    device = _resolve_device(settings.device)
    n_threads = min(n_cores, available_processors()) if threads == "auto" else threads
    return {
        "source": settings.source,
        "revision": settings.revision,
        "commit": commit,
        **{name: digest(folder) for name, digest in _DIGESTS.items()},
        "architecture": architecture,
        "dtype": settings.dtype,
        "device": device,
        "threads": n_threads if device == "cpu" else None,
        "versions": {name: version(name) for name in _VERSIONS} | {"python": platform.python_version()},
    }


def _resolve_device(device: str) -> str:
    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _inspect_architecture(folder: Path, settings: ModelSettings) -> dict[str, Any]:
    with _quiet(), _model_errors(settings.source), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, settings.dtype),
            attn_implementation=settings.attention,
            trust_remote_code=False,
        )
        trunk, text = find_trunk(model), model.config.get_text_config()
    return {
        "class": type(model).__name__,
        "model_type": config.model_type,
        "n_layers": trunk.n_layers,
        "width": text.hidden_size,
        "vocab_size": text.vocab_size,
        "max_positions": getattr(text, "max_position_embeddings", None),
        "attention": text._attn_implementation,
        "attn_module": trunk.attn_name,
        "mlp_module": trunk.mlp_name,
    }


def load_trunk(facts: Mapping[str, Any], settings: ModelSettings) -> Trunk:
    """Load the model that was resolved, and keep its trunk: in eval mode, without gradients, on its device.

    Sets torch's number of CPU threads to the resolved one too, for the last bits of the values depend on it.

    Args:
        facts: content of ``model.json``.
        settings: section ``model`` of the configuration, which the facts must be of.

    Raises:
        IntegrityError: the model on disk is no longer the one that was resolved.
        ModelError: it cannot be loaded, or its files lack weights; or the facts are of another configuration.
    """
    return _load(facts, settings, with_head=False)[1]


def load_model(facts: Mapping[str, Any], settings: ModelSettings) -> tuple[PreTrainedModel, Trunk]:
    """As :func:`load_trunk`, but with the head: the whole model on its device, and the trunk within it."""
    return _load(facts, settings, with_head=True)


def _load(facts: Mapping[str, Any], settings: ModelSettings, *, with_head: bool) -> tuple[PreTrainedModel, Trunk]:
    for name in ("source", "revision", "dtype"):
        if facts[name] != getattr(settings, name):
            raise ModelError(
                f"model.json was resolved for {name} {facts[name]!r}, but the configuration says "
                f"{getattr(settings, name)!r}. Run the plain command: it resolves the model anew"
            )
    if facts["device"].startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(
            f"the model's device is {facts['device']}, but torch sees no GPU here; set model.device to cpu"
        )
    folder = _resolved_folder(facts, ("weights_digest", "config_digest"))
    if facts["threads"] is not None:
        torch.set_num_threads(facts["threads"])
    with _quiet(), _model_errors(facts["source"]):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, facts["dtype"]),
            attn_implementation=facts["architecture"]["attention"],
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, info = loaded
        trunk = find_trunk(model.eval().requires_grad_(False))
        _check_complete(info["missing_keys"], "" if with_head else f"{trunk.prefix}.", folder)
        # A head that is never run takes no room on a GPU: the trunk alone is moved, and the head let go by the caller.
        (model if with_head else trunk.module).to(facts["device"])
    return model, trunk


def _check_complete(missing: set[str], prefix: str, folder: Path) -> None:
    # transformers fills what a file lacks with random numbers and only warns.
    lost = sorted(name for name in missing if name.startswith(prefix))
    if lost:
        raise ModelError(
            f"{folder} lacks {len(lost)} of the model's tensors, such as {', '.join(lost[:3])}; fetch it anew"
        )


def load_tokenizer(facts: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Load the tokenizer that was resolved. It does not warn of texts beyond the model's limit: they are cut later.

    Args:
        facts: content of ``model.json``.

    Raises:
        IntegrityError: the tokenizer on disk is no longer the one that was resolved.
        ModelError: it cannot be loaded.
    """
    folder = _resolved_folder(facts, ("tokenizer_digest",))
    with _quiet(), _model_errors(facts["source"]):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _resolved_folder(facts: Mapping[str, Any], checked: tuple[str, ...]) -> Path:
    """The folder of a resolved model: of exactly its commit, and with the digests named in ``checked``."""
    folder, _ = find_model_folder(facts["source"], facts["commit"])
    for name in checked:
        found = _DIGESTS[name](folder)
        if found != facts[name]:
            raise IntegrityError(
                folder,
                expected=f"{name} {facts[name]}",
                found=found,
                remedy="The model changed after it was resolved: put it back, or delete the run's model.json (in "
                "results/{run}) to resolve it anew.",
            )
    return folder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers without progress bars and warnings for a while."""
    had_bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _model_errors(source: str) -> Iterator[None]:
    """Whatever transformers raises becomes a ModelError that names the model."""
    try:
        yield
    except AnchorageError:
        raise
    except Exception as error:
        raise ModelError(f"model {source!r} cannot be used: {type(error).__name__}: {error}") from error


def describe_environment(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What, beside model and batch, decides the last bits of an activation. Where two of these are equal, bit-equality
    can be demanded; where they differ, only closeness.

    Args:
        facts: content of ``model.json``.

    Returns:
        A flat dictionary of plain JSON, the same whenever it is asked for. Call it after :func:`load_trunk`, which sets
        the number of threads. Kernel libraries inside torch are covered by torch's version.
    """
    kind = facts["device"].partition(":")[0]
    environment = {
        "device": kind,
        "device_name": _device_name(facts["device"]),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "threads": torch.get_num_threads() if kind == "cpu" else None,
        "dtype": facts["dtype"],
        "attention": facts["architecture"]["attention"],
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if kind == "cpu":
        environment["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        environment["mkldnn"] = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    elif kind == "cuda":
        environment["cuda"] = torch.version.cuda
        environment["cudnn"] = torch.backends.cudnn.version()
        environment["tf32_matmul"] = torch.backends.cuda.matmul.allow_tf32
        environment["tf32_cudnn"] = torch.backends.cudnn.allow_tf32
    return environment


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if names:
            return names[0]
    return platform.processor() or platform.machine()
