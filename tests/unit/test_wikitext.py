"""Goal: articles come out of a dump as clean text, all else stays behind.

Method: small pieces of markup and a small dump written by hand, with the exact text expected of each.
"""

from __future__ import annotations

import bz2
import tracemalloc
from pathlib import Path
from xml.etree.ElementTree import ParseError

import pytest

from anchorage.wikitext import Article, read_articles, strip_markup

PAGE = (
    "<page><title>{title}</title><ns>{ns}</ns><id>{id}</id>{extra}"
    "<revision><id>9{id}</id><text>{text}</text></revision></page>"
)


def write_dump(path: Path, pages: str) -> Path:
    xml = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/"><siteinfo/>{pages}</mediawiki>'
    path.write_bytes(bz2.compress(xml.encode()))
    return path


def page(title: str, text: str, *, number: int = 1, ns: int = 0, extra: str = "") -> str:
    return PAGE.format(title=title, ns=ns, id=number, extra=extra, text=text)


def test_only_articles_are_read(tmp_path: Path) -> None:
    pages = page("First", "One &lt;ref&gt;x&lt;/ref&gt; &amp;amp; two", number=12)
    pages += page("Moved", "#REDIRECT [[First]]", number=13, extra='<redirect title="First" />')
    pages += page("Talk:First", "chat", number=14, ns=1)
    pages += page("Last", "", number=15)
    articles = list(read_articles(write_dump(tmp_path / "dump.bz2", pages)))
    assert articles == [Article(12, "First", "One <ref>x</ref> &amp; two"), Article(15, "Last", "")]


def test_a_damaged_dump_is_an_error(tmp_path: Path) -> None:
    whole = write_dump(tmp_path / "dump.bz2", page("First", "One")).read_bytes()
    (tmp_path / "torn.bz2").write_bytes(whole[:-20])
    (tmp_path / "bad.bz2").write_bytes(bz2.compress(b"<mediawiki><page>"))
    with pytest.raises(EOFError):
        list(read_articles(tmp_path / "torn.bz2"))
    with pytest.raises(ParseError):
        list(read_articles(tmp_path / "bad.bz2"))


def test_memory_holds_one_page(tmp_path: Path) -> None:
    peaks = []
    for n_pages in (100, 1000):
        dump = write_dump(tmp_path / "dump.bz2", page("Title", "text " * 400) * n_pages)
        tracemalloc.start()
        assert sum(1 for _ in read_articles(dump)) == n_pages
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Nine hundred pages more are 1.8 MB of text.
    assert peaks[1] - peaks[0] < 200_000, peaks


CASES = {
    "emphasis": ("'''Bold''', ''italic'' and '''''both'''''.", "Bold, italic and both.\n"),
    "unpaired emphasis": ("A ''torn <ref>note</ref> [[File:x.png]]word.\n\nNext.", "A torn word.\n\nNext.\n"),
    "links": (
        "[[Paris]], [[Rome|the city]], [[:Category:Art]] [http://x.org a page] [http://x.org]",
        "Paris, the city, Category:Art a page\n",
    ),
    "pictures": ("[[File:a.jpg|thumb|A [[cat]] sits]]Text.[[Image:b.png]]", "Text.\n"),
    "categories": ("Text.\n\n[[Category:Cats]]\n[[Category:Dogs|*]]", "Text.\n"),
    "footnotes": ('One.<ref name="a">{{cite book|title=B}}</ref> Two.<ref name="a" />', "One. Two.\n"),
    "tables": ('Before.\n{| class="wikitable"\n! Head\n|-\n| Cell\n|}\nAfter.', "Before.\n\nAfter.\n"),
    "nested tables": ("{|\n|\n{|\n| in\n|}\n|}\nAfter.", "After.\n"),
    "comments": ("One<!-- no --> two.", "One two.\n"),
    "entities": ("A&nbsp;&ndash;&amp;nbsp;B", "A – B\n"),
    "powers": ("10<sup>3</sup> km<sup>2</sup> of H<sub>2</sub>O", "10^3 km^2 of H2O\n"),
    "templates": (
        "{{Infobox|name=X}}It is {{convert|5|km|mi}} or {{convert|2|to|3|m|ft}} {{lang|fr|loin}}.",
        "It is 5 km or 2 to 3 m loin.\n",
    ),
    "formulas": ("The sum <math>a+b</math>is.", "The sum is.\n"),
    "emptied brackets": (
        "Rome ({{IPA-it|x}}) and Oslo ({{lang-no|Oslo}}; {{x}}) ({{x}}, old)",
        "Rome and Oslo (Oslo) (old)\n",
    ),
    "lists": ("* one\n** two\n# three\n; term\n: said", "one\ntwo\nthree\nterm\nsaid\n"),
    "dropped sections": (
        "Text.\n== Life ==\nLong.\n== References ==\n* a\n=== Books ===\n* b\n== End ==\nOver.",
        "Text.\n\nLife\nLong.\n\nEnd\nOver.\n",
    ),
    "empty sections": ("Text.\n== Data ==\n=== Table ===\n{|\n| x\n|}\n== End ==\nOver.", "Text.\n\nEnd\nOver.\n"),
    "magic words": ("__NOTOC__\nText.", "Text.\n"),
    "nothing": ("{{Infobox}}\n[[Category:Cats]]", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_markup_is_stripped(case: str) -> None:
    wikitext, expected = CASES[case]
    assert strip_markup(wikitext) == expected
