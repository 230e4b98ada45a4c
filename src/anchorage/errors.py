"""Every error a user can meet, under one base class."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

_MAX_SHOWN = 300


class AnchorageError(Exception):
    """Base of all errors raised on purpose: bad input, damaged data, a full disk. The message says the remedy."""


class SettingsError(AnchorageError):
    """The configuration is wrong; the message lists every fault with its dotted path."""


class CorpusError(AnchorageError):
    """The text cannot be read, or holds too little."""


class ModelError(AnchorageError):
    """The model or tokenizer cannot be found, read or used."""


class ResourceError(AnchorageError):
    """The default model or corpus cannot be fetched or made."""


class SiteError(AnchorageError):
    """A site names no place in this model, or the place does not give hidden states."""


class CaptureError(AnchorageError):
    """The capture cannot go on: values that do not fit the storage dtype, no space, a folder in use."""


class MeasurementError(AnchorageError):
    """A measurement could not be made, or its table is not whole."""


class IntegrityError(AnchorageError):
    """Stored bytes are not what they must be.

    The message is one printable line, whatever the damaged bytes say; the attributes hold the values as they are.

    Args:
        file: the damaged file.
        expected: what should be there.
        found: what is there.
        remedy: what the user can do about it.
    """

    def __init__(self, file: Path | str, *, expected: object, found: object, remedy: str) -> None:
        super().__init__(f"{_show(file)}: expected {_show(expected)}, found {_show(found)}. {remedy}")
        self.file = Path(file)
        self.expected = expected
        self.found = found
        self.remedy = remedy


def _show(value: object) -> str:
    """A value as one short line that any terminal and log can take: damaged bytes may say anything."""
    text = str(value)
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def did_you_mean(name: str, known: Iterable[str], *, n: int = 3) -> str:
    """Return ``; did you mean a, b?`` for the known names nearest to ``name``, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=n, cutoff=0.5)
    return f"; did you mean {', '.join(near)}?" if near else ""
