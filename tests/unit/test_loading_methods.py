"""Methods of loading: each gives the file's tensors bit for bit, and reads of the disk what it says it reads.

Goal: a row of the lab's tables is about the method it names. Method: small subjects of all three kinds, and files of a
few times the device's read-ahead, evicted, loaded in fresh processes. Oracle: safetensors' and torch's own loaders, and
/proc/self/io. Controls: a method that is wrongly said to be lazy, and one wrongly said to read all, are found.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import mmap
import os
import pickle
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from anchorage.errors import IntegrityError, SettingsError
from anchorage.loading.fresh import FreshProcesses
from anchorage.loading.methods import IMPORTS, METHODS, Method, check_methods, load_torch
from anchorage.loading.raw import map_file, mapped_tensors, read_ahead_bytes
from anchorage.loading.subject import Subject
from anchorage.settings import LoadingSettings
from anchorage.store.reader import open_cache
from loads import build_subjects, count_bytes, digest_of, evict, read_bytes, write_pair
from stores import Store, flip_bit

TESTS = Path(__file__).parents[1]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes that the disk gave a process")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_subjects(tmp_path_factory.mktemp("subjects"))


@pytest.fixture(scope="module")
def subjects(built):
    return built[1]


@pytest.fixture(scope="module")
def fresh():
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *([path] if path else [])])
    with FreshProcesses(*IMPORTS, "loads") as processes:
        yield processes
    os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Four tensors, each three times the read-ahead, of which one is wanted."""
    folder = tmp_path_factory.mktemp("pair")
    read_ahead = max(read_ahead_bytes(str(folder)), 512 << 10)
    return write_pair(folder, 4, 3 * read_ahead + 4, wanted=["t2"])


def need(method):
    for module in METHODS[method].needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: it is no package of the workflow's")


def expected(path):
    return torch.load(path) if path.endswith(".pt") else safetensors.torch.load_file(path)


def same_bits(a, b):
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def fetch(fresh, method, subject):
    """Bytes that the disk gives when the wanted tensors are loaded cold and touched."""
    path, names = subject.files[METHODS[method].suffix], METHODS[method].wanted(subject)
    evict(path)
    found = fresh.call(count_bytes, method=method, path=path, subject=subject.to_json(), names=list(names))
    assert found["digests"] == {name: subject.digests[name] for name in names}
    if not found["bytes"]:
        pytest.skip(f"{path} lies where nothing is ever cold (tmpfs)")
    return found["bytes"]


def is_as_told(method: Method, subject: Subject, n_bytes: int) -> bool:
    """Whether a cold method fetched the whole file or less, as its table line tells."""
    return method.reads_all(subject) == (n_bytes > 0.98 * subject.file_bytes[method.suffix])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["weights", "big", "shard"])
def test_every_method_gives_the_files_tensors(subjects, kind, method):
    need(method)
    line, subject = METHODS[method], subjects[kind]
    path, names = subject.files[line.suffix], line.wanted(subject)
    tensors, oracle = line.load(path, subject, names), expected(path)
    assert names
    assert all(same_bits(tensors[name], oracle[name]) for name in names)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("reduce", ["none", "mean"])
def test_our_reader_gives_any_shards_tensor_as_it_is_stored(tmp_path, layout, reduce):
    tiers = {"only": {"sites": ["embed", "block.*"], "reduce": reduce}}
    corpus = {"layout": layout, "rows": 20}
    _, subjects = build_subjects(tmp_path, corpus=corpus, capture={"tiers": tiers, "storage_dtype": "bfloat16"})
    shard = subjects["shard"]
    path = shard.files[".safetensors"]
    assert all(same_bits(t, expected(path)[name]) for name, t in load(shard, "ours").items())


def load(subject, method):
    return METHODS[method].load(subject.files[METHODS[method].suffix], subject, subject.wanted)


def test_our_reader_refuses_a_shard_with_a_changed_bit(tmp_path):
    _, subjects = build_subjects(tmp_path)
    shard = subjects["shard"]
    load(shard, "ours")
    flip_bit(Path(shard.files[".safetensors"]), shard.file_bytes[".safetensors"] // 2)
    with pytest.raises(IntegrityError, match="have changed on disk"):
        METHODS["ours"].load("", shard, sorted(shard.digests.keys() - {"tokens", "row_digests"}))


def test_a_method_added_in_five_lines_works(subjects, built, monkeypatch):
    def load_bytes(path, subject, names):
        from safetensors.torch import load

        return load(open(path, "rb").read())

    monkeypatch.setitem(METHODS, "bytes", Method(load_bytes))
    check_methods(with_methods(built, ["bytes"]))
    assert same_bits(load(subjects["big"], "bytes")["tensor.63"], expected(subjects["big"].files[".pt"])["tensor.63"])


def test_an_unknown_method_is_answered_with_near_names(built):
    check_methods(with_methods(built, list(METHODS)))
    with pytest.raises(SettingsError, match=r"no method 'load-file'; did you mean load_file"):
        check_methods(with_methods(built, ["torch.load", "load-file"]))


def with_methods(built, methods):
    return built[0].model_copy(update={"loading": LoadingSettings(methods=methods)})


@LINUX
@pytest.mark.parametrize("method", METHODS)
def test_a_cold_method_reads_the_whole_file_or_less_as_its_line_says(fresh, pair, method):
    need(method)
    n_bytes, line = fetch(fresh, method, pair), METHODS[method]
    assert n_bytes > 0.98 * pair.tensor_bytes["t2"]
    assert is_as_told(line, pair, n_bytes), (n_bytes, pair.file_bytes)


@LINUX
def test_a_method_that_is_not_as_its_line_says_would_be_found(fresh, pair):
    whole, less = fetch(fresh, "torch.load", pair), fetch(fresh, "ours", pair)
    assert not is_as_told(Method(load_torch, ".pt", lazy=True), pair, whole)
    assert not is_as_told(dataclasses.replace(METHODS["ours"], lazy=False), pair, less)


@LINUX
@pytest.mark.parametrize("method", [name for name, line in METHODS.items() if not line.first_only])
def test_a_cold_method_reads_the_whole_file_where_all_is_wanted(fresh, subjects, method):
    need(method)
    big = subjects["big"]
    assert abs(fetch(fresh, method, big) / big.file_bytes[METHODS[method].suffix] - 1) < 0.02


@LINUX
def test_our_reader_fetches_one_site_of_many_and_no_more(fresh, tmp_path):
    sites = [f"block.{i}" for i in range(16)]
    store = Store(tmp_path, n_rows=8, seq_len=64, width=2048, sites=sites, tier_rows={"tokens": 8}).build()
    record = open_cache(store.cache).manifest.shards[0].tiers["tokens"]
    path = store.cache / record.file
    stored, site = expected(str(path)), sites[7]
    subject = Subject(
        name="shard",
        files={".safetensors": str(path)},
        file_bytes={".safetensors": path.stat().st_size},
        digests={name: digest_of(tensor) for name, tensor in stored.items()},
        tensor_bytes={name: tensor.nbytes for name, tensor in stored.items()},
        wanted=(site,),
        cache=str(store.cache),
        tier="tokens",
        rows=(0, 8),
    )
    n_bytes = stored[site].nbytes
    del stored
    evict(store.cache / "manifest.jsonl")
    assert n_bytes == 8 * 64 * 2048 * 2
    assert n_bytes <= fetch(fresh, "ours", subject) <= 1.05 * n_bytes
    assert fetch(fresh, "readinto", subject) > 15 * n_bytes  # control: what is not lazy fetches them all


@LINUX
def test_the_kernel_answers_one_request_for_a_whole_file_with_a_part_of_it(pair):
    path = pair.files[".safetensors"]

    def count(advise):
        evict(path)
        before = read_bytes()
        advise()
        return read_bytes() - before

    if not (stepped := count(lambda: METHODS["mmap-willneed"].load(path, pair, []))):
        pytest.skip(f"{path} lies where nothing is ever cold (tmpfs)")
    assert stepped > 0.98 * pair.file_bytes[".safetensors"]
    assert count(lambda: map_file(path).madvise(mmap.MADV_WILLNEED)) < 0.5 * stepped


def test_mapped_tensors_are_private(subjects):
    path = subjects["big"].files[".safetensors"]
    tensors = mapped_tensors(path, map_file(path), ["tensor.00"])
    before = Path(path).read_bytes()
    tensors["tensor.00"].zero_()
    assert Path(path).read_bytes() == before


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (Path(self.path), "pwned")


@pytest.mark.parametrize("method", ["torch.load", "torch.load-mmap"])
def test_a_malicious_file_is_refused_and_does_nothing(tmp_path, method, subjects):
    target, path = tmp_path / "written", tmp_path / "bad.pt"
    torch.save({"a": Malice(target)}, path)
    with pytest.raises(pickle.UnpicklingError, match=r"Weights only load failed"):
        METHODS[method].load(str(path), subjects["big"], ["a"])
    assert not target.exists()
    torch.load(path, weights_only=False)  # control: nothing but weights_only stood in its way
    assert target.read_text() == "pwned"
