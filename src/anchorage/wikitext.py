"""Wikipedia's XML dumps as plain text: read the pages in a stream, take the articles, strip their markup.

The markup language is parsed by mwparserfromhell. Its own `strip_code` keeps the texts of footnotes, picture captions
and tables in the midst of sentences and drops every template; so nodes are first removed or replaced here by a few
rules. What is left is prose, headings and list items. It is *not* a faithful rendering: formulas, tables and most
templates are gone, and a sentence that was built around one has a hole.
"""

from __future__ import annotations

import bz2
import html
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_DROPPED_TAGS = {"ref", "references", "table", "gallery", "math", "timeline", "score", "imagemap", "source"}
_DROPPED_TAGS |= {"syntaxhighlight", "hiero", "chem", "ce", "graph"}
_DROPPED_NAMESPACES = {"file", "image", "media", "category", "special", "template"}
# Sections of lists of books, links and footnotes; their footnotes are gone anyway.
_DROPPED_SECTIONS = {"references", "external links", "see also", "further reading", "notes", "footnotes", "citations"}
_DROPPED_SECTIONS |= {"bibliography", "sources", "notes and references", "references and notes", "works cited"}
# Templates that hold words of the sentence around them; those words stand in the first or the last place.
_FIRST_KEPT = {"nihongo", "nowrap", "smaller", "small", "big", "angbr", "ipa", "quote", "sc", "val"}
_LAST_KEPT = {"lang", "transl"}
# {{convert|3|to|5|km|mi}} has its unit in the fourth place, {{convert|3|km|mi}} in the second.
_CONVERT_RANGES = {"to", "and", "or", "by", "x", "-", "–", "to(-)", "and(-)"}


class Article(NamedTuple):
    """A page of the encyclopedia proper: its number, its title, its text with markup."""

    page_id: int
    title: str
    wikitext: str


def read_articles(path: Path) -> Iterator[Article]:
    """Yield the articles of a bz2-compressed MediaWiki export in order; redirects and other pages are passed over.

    Memory holds one page at a time.

    Raises:
        OSError, EOFError: the compressed data is damaged.
        xml.etree.ElementTree.ParseError: the XML is damaged.
    """
    with bz2.open(path) as file:
        events = ElementTree.iterparse(file, events=("start", "end"))
        _, root = next(events)
        for event, page in events:
            if event != "end" or page.tag.rpartition("}")[2] != "page":
                continue
            if page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None:
                text = page.findtext("{*}revision/{*}text") or ""
                yield Article(int(page.findtext("{*}id", "0")), page.findtext("{*}title", ""), text)
            # The parser hangs every page on the root: without this, memory grows with the dump.
            root.clear()


def strip_markup(wikitext: str) -> str:
    """Turn wiki markup into plain text: paragraphs, headings and list items, a line each, ended by a newline.

    An article of nothing but markup gives an empty text.
    """
    import mwparserfromhell

    # Quote marks are left to _tidy: where they do not pair up, the parser gives up on all the markup between them.
    code = mwparserfromhell.parse(wikitext, skip_style_tags=True)
    _prune(code)
    code.nodes = _drop_empty_sections(_drop_sections(code.nodes))
    return _tidy(code.strip_code(normalize=True, collapse=True))


def _prune(code: Any) -> None:
    """Remove or replace nodes, at every depth, in place."""
    code.nodes = [kept for node in code.nodes if (kept := _prune_node(node)) is not None]


def _prune_node(node: Any) -> Any:
    from mwparserfromhell.nodes import Comment, ExternalLink, Heading, Tag, Template, Text, Wikilink

    if isinstance(node, Comment) or (isinstance(node, Tag) and _name(node.tag) in _DROPPED_TAGS):
        return None
    if isinstance(node, Template):
        return _replace_template(node)
    if isinstance(node, Wikilink):
        return _replace_link(node)
    if isinstance(node, Tag) and node.contents is not None:
        _prune(node.contents)
        if _name(node.tag) == "sup":
            return Text("^" + str(node.contents.strip_code()))
    if isinstance(node, Heading | ExternalLink) and node.title is not None:
        _prune(node.title)
    return node


def _replace_template(node: Any) -> Any:
    from mwparserfromhell.nodes import Text

    values = []
    for param in node.params:
        if not param.showkey:
            _prune(param.value)
            values.append(str(param.value.strip_code()).strip())
    text = _template_text(_name(node.name), values)
    return Text(text) if text else None


def _template_text(name: str, values: list[str]) -> str:
    """What stays of a template: its words, where it is one of the few that hold words."""
    if not values:
        return ""
    if name == "chem":
        return "".join(values)
    if name == "convert":
        return " ".join(values[: 4 if len(values) > 3 and values[1] in _CONVERT_RANGES else 2])
    if name in _FIRST_KEPT or name.startswith("lang-"):
        return values[0]
    return values[-1] if name in _LAST_KEPT else ""


def _replace_link(node: Any) -> Any:
    from mwparserfromhell.nodes import Text

    namespace, colon, _ = str(node.title).partition(":")
    if colon and namespace.strip().lower() in _DROPPED_NAMESPACES:
        return None
    if node.text is None:
        return Text(str(node.title).lstrip(":"))
    _prune(node.text)
    return node


def _name(code: Any) -> str:
    return str(code).strip().lower().replace("_", " ")


def _drop_sections(nodes: list[Any]) -> list[Any]:
    """Leave out the sections named in `_DROPPED_SECTIONS`, with their subsections."""
    from mwparserfromhell.nodes import Heading

    kept, dropped_level = [], 0
    for node in nodes:
        if isinstance(node, Heading) and (not dropped_level or node.level <= dropped_level):
            dropped_level = node.level if _name(node.title.strip_code()) in _DROPPED_SECTIONS else 0
        if not dropped_level:
            kept.append(node)
    return kept


def _drop_empty_sections(nodes: list[Any]) -> list[Any]:
    """Leave out headings with no text below them, for their tables are gone; put a blank line before the others."""
    from mwparserfromhell.nodes import Heading, Text

    kept, next_level, has_text = [], 0, False
    for node in reversed(nodes):
        if not isinstance(node, Heading):
            kept.append(node)
            has_text = (
                has_text or re.search(r"\w", str(node.__strip__(normalize=True, collapse=True) or "")) is not None
            )
        elif has_text or next_level > node.level:
            kept += [node, Text("\n\n")]
            next_level, has_text = node.level, False
    return kept[::-1]


def _tidy(text: str) -> str:
    """Repair what removed nodes leave behind: quote marks, list markers, empty brackets, lines without a word."""
    text = re.sub(r"'{2,}|__[A-Z]+__|[\u200e\u200f\ufeff]", "", html.unescape(text))
    text = re.sub(r"[ \t\u00a0\u2009]+", " ", text)
    text = re.sub(r"(?<=\()[\s;,:]+|[\s;,:]+(?=\))", "", text)
    text = re.sub(r" ?\(\s*\)| ?\[\s*\]", "", text)
    text = re.sub(r" +([,.;:])", r"\1", text)
    text = re.sub(r",{2,}", ",", text)
    lines = [line.lstrip(" *#:;").rstrip() for line in text.splitlines()]
    paragraphs = "\n".join(line if re.search(r"\w", line) else "" for line in lines)
    paragraphs = re.sub(r"\n{3,}", "\n\n", paragraphs).strip()
    return paragraphs + "\n" if paragraphs else ""
