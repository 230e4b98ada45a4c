"""Where a model's files are, and what they are: a local folder or a snapshot of the Hub, and its digests.

Weights count only as safetensors; a pickle is never read.
"""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import snapshot_download

from anchorage.digest import digest_file, digest_files
from anchorage.errors import ModelError
from anchorage.sources import is_local

# Chat templates do not change what a text's tokens are, and are left out.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
)
_HUB_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", *_TOKENIZER_FILES]
# Sub-folders hold other formats; consolidated files are the same weights a second time.
_HUB_IGNORED = ["*/*", "consolidated*"]


def find_model_folder(source: str, revision: str | None) -> tuple[Path, str | None]:
    """The folder that holds a model, downloaded from the Hub where the source is no local path.

    Args:
        source: a local folder or a Hub id.
        revision: branch, tag or commit on the Hub.

    Returns:
        The folder, and the commit it holds; None for a local folder.

    Raises:
        ModelError: there is no such model, the Hub cannot be reached, or it has no safetensors weights.
    """
    if is_local(source):
        return _check_folder(Path(source).expanduser(), source), None
    try:
        folder = Path(
            snapshot_download(source, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED)
        )
    except Exception as error:  # the Hub's client, HTTP and cache raise some dozen kinds
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        raise ModelError(
            f"model {source!r} (revision {revision or 'default'}) is no local folder, and the Hugging Face Hub did not "
            f"give it ({reason}). Check the id; or run `hf download {source}` where there is network; or set "
            f"model.source to a local folder. HF_HUB_OFFLINE is {os.environ.get('HF_HUB_OFFLINE', 'not set')}."
        ) from None
    return _check_folder(folder, source), folder.name


def _check_folder(folder: Path, source: str) -> Path:
    if not folder.is_dir():
        raise ModelError(
            f"model folder {folder} does not exist. Set model.source to one that save_pretrained wrote, or to a Hub id"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model {source!r}: {folder} has no config.json; it must be a folder written by save_pretrained"
        )
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model {source!r}: {folder} has no *.safetensors file. Other weights (pickled .bin files) are never read: "
            "load the model once with transformers and write it anew with save_pretrained"
        )
    return folder


def digest_weights(folder: Path) -> str:
    """Digest of all weight files of a model folder."""
    return digest_files(folder.glob("*.safetensors"))


def digest_config(folder: Path) -> str:
    """Digest of a model folder's ``config.json``."""
    return digest_file(folder / "config.json")


def digest_tokenizer(folder: Path) -> str:
    """Digest of all tokenizer files of a model folder.

    Raises:
        ModelError: it has none.
    """
    files = {path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)}
    if not files:
        raise ModelError(f"{folder} has no tokenizer (tokenizer.json or its like); save the model's tokenizer into it")
    return digest_files(files)
