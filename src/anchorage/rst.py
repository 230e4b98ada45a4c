"""Pieces of reStructuredText, every value escaped."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_MARKUP = re.compile(r"[!-/:-@\[-`{-~•‣⁃]")  # ASCII punctuation, and what begins a list


def plain(value: object) -> str:
    """A value as a line of text that reStructuredText shows as it is."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(str(value).split()))


def section(title: str, *blocks: str) -> str:
    """A titled section of the blocks that are not empty."""
    return "\n\n".join([f"{title}\n{'-' * len(title)}", *(block for block in blocks if block)])


def bullets(lines: Iterable[str]) -> str:
    """A list, a line an item."""
    return "\n".join(f"- {plain(line)}" for line in lines)


def table(head: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    """A table with a line of headings, or with a column of them where ``head`` is None. Cells are markup."""
    option = "   :header-rows: 1" if head else "   :stub-columns: 1"
    lines = ["\n     - ".join([f"   * - {first}", *others]) for first, *others in [*([head] if head else []), *rows]]
    return "\n".join([".. list-table::", option, "", *lines])


def image(path: Path, alt: str) -> str:
    """A picture inside the text itself: the document needs no other file."""
    kind = {".svg": "svg+xml", ".png": "png"}[path.suffix]
    # In lines: docutils refuses a document that has a line of over 10,000 characters.
    data = base64.encodebytes(path.read_bytes()).decode().split()
    return "\n   ".join([f".. image:: data:image/{kind};base64,", *data, f":alt: {alt}"])
