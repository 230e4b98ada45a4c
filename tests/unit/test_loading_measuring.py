"""Loading measured: a row is what its state claims, its bytes are the right ones, or there is no row.

Goal: cold and warm are proved, not believed; a wrong tensor is named; what cannot run says why; the table is whole.
Method: small files of mixed tensors, every method, states set wrongly on purpose. Oracle: bytes cut out of the file by
its own header, sizes on disk, tables put together by hand. Controls: nothing dropped, nothing read back, a wrong
digest, a line too few; each is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
import time
import types
from mmap import PAGESIZE
from pathlib import Path

import pandas as pd
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from anchorage.durable import write_json
from anchorage.errors import AnchorageError, IntegrityError, MeasurementError
from anchorage.loading import measuring, trial
from anchorage.loading.fresh import FreshProcesses
from anchorage.loading.measuring import COLUMNS, draw_states, measure_method, tabulate, uses_of
from anchorage.loading.methods import METHODS, Method
from anchorage.loading.pagecache import filesystem, make_cold, make_warm, never_cold
from anchorage.loading.subject import Subject, digest_tensor, read_subjects
from anchorage.loading.trial import measure, prove

PLAIN = ["torch.load", "torch.load-mmap", "load_file", "one-tensor"]
ON_LINUX = sys.platform.startswith("linux")
MIB = 2**20


def build_subject(folder, *, name="big", n_tensors=8):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(MIB // 4, 2, generator=generator).to(torch.bfloat16) for i in range(n_tensors)}
    tensors |= {"scalar": torch.tensor(3.0), "few": torch.arange(5, dtype=torch.int64), "none": torch.empty(0, 4)}
    files = {suffix: str(folder / f"{name}{suffix}") for suffix in (".pt", ".safetensors")}
    torch.save(tensors, files[".pt"])
    save_file(tensors, files[".safetensors"])
    return Subject(
        name=name,
        files=files,
        file_bytes={suffix: Path(path).stat().st_size for suffix, path in files.items()},
        digests=digests_by_header(Path(files[".safetensors"])),
        tensor_bytes={name: tensor.nbytes for name, tensor in tensors.items()},
        wanted=tuple(tensors),
    )


def digests_by_header(path):
    """xxh3_64 of each tensor's bytes, cut out of a safetensors file without its library."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    ranges = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: xxhash.xxh3_64_hexdigest(data[start + a : start + b]) for name, (a, b) in ranges.items()}


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("subject")
    if reason := never_cold(folder):
        pytest.skip(f"not run: the tests' folder lies on {reason}")
    return build_subject(folder)


@pytest.fixture(scope="module")
def fresh():
    with FreshProcesses(*measuring._preloaded(Subject("big", {}, {}, {}, {}, ()), "load_file")) as server:
        yield server


@pytest.fixture
def share_server(fresh, monkeypatch):
    """Have measure_method use the server that is there: starting one takes seconds."""
    monkeypatch.setattr(measuring, "FreshProcesses", lambda *modules: Shared(fresh.call))


class Shared:
    def __init__(self, call):
        self.call = call

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def try_state(fresh, subject, method, state):
    return fresh.call(measure, subject=subject.to_json(), method=method, state=state)


def run_method(subject, method="load_file", *, repeats=2, log=lambda line: None):
    return measure_method(subject, method, key="k", repeats=repeats, seed=0, drop_caches=False, log=log)


@pytest.mark.skipif(not ON_LINUX, reason="not run: bytes from the disk are counted on Linux")
@pytest.mark.parametrize("method", PLAIN)
def test_cold_and_warm_are_what_they_say(fresh, subject, method):
    chosen = METHODS[method]
    path, wanted = subject.files[chosen.suffix], chosen.wanted(subject)
    make_cold(path)
    cold = try_state(fresh, subject, method, "cold")
    make_warm(path)
    warm = try_state(fresh, subject, method, "warm")
    size = Path(path).stat().st_size
    assert (cold["resident_before"], warm["resident_before"], warm["bytes_from_disk"]) == (0, 1, 0)
    assert cold["bytes_from_disk"] == pytest.approx(size, rel=0.02) or method == "one-tensor"
    for row in (cold, warm):
        assert row["file_bytes"] == size
        assert row["touched_bytes"] == sum(subject.tensor_bytes[name] for name in wanted)
        assert row["total_s"] == pytest.approx(row["load_s"] + row["touch_s"], abs=3e-6)
        assert row["gb_s"] == pytest.approx(row["touched_bytes"] / 1e9 / row["total_s"], rel=0.01)
        assert row["first_forward_s"] is None
        assert row["use"] == "touch"
        assert 0 <= row["wait_s"] < 60
        assert 0 < row["base_mib"] <= row["peak_mib"]
    assert warm["resident_loaded"] == 1
    assert 0 <= cold["resident_loaded"] <= 1
    assert method != "torch.load" or cold["resident_loaded"] == 1  # what copies has read all by then
    assert cold["major_faults"] > 0 or method == "torch.load"  # mapped pages are waited for, copied ones are not


@pytest.mark.skipif(not ON_LINUX, reason="not run: kinds of memory are told apart on Linux")
def test_copies_are_anonymous_and_mapped_pages_are_not(fresh, subject):
    copied = try_state(fresh, subject, "torch.load", "as-found")
    mapped = try_state(fresh, subject, "load_file", "as-found")
    assert copied["anonymous_mib"] > 7.9
    assert mapped["anonymous_mib"] < 1
    assert mapped["file_mib"] - copied["file_mib"] > 7  # libraries' code is in both


@pytest.mark.skipif(not ON_LINUX, reason="not run: bytes from the disk are counted on Linux")
@pytest.mark.parametrize("method", PLAIN)
def test_a_state_that_was_not_made_is_refused(fresh, subject, method):
    path = subject.files[METHODS[method].suffix]
    make_warm(path)
    with pytest.raises(MeasurementError, match=r"no cold measurement.*nothing of it in the page cache.*found 100.00"):
        try_state(fresh, subject, method, "cold")
    make_cold(path)
    with pytest.raises(MeasurementError, match=r"no warm measurement.*the whole file in the page cache.*found 0.0000%"):
        try_state(fresh, subject, method, "warm")


def test_with_dropping_disabled_the_cold_job_fails(subject, share_server, monkeypatch):
    make_warm(subject.files[".safetensors"])
    monkeypatch.setattr(measuring, "make_cold", lambda path, drop_caches: None)
    with pytest.raises(MeasurementError, match=r"big.safetensors: this was no cold measurement and is not reported"):
        run_method(subject)


def test_with_warming_disabled_the_warm_job_fails(subject, share_server, monkeypatch):
    monkeypatch.setattr(measuring, "make_warm", make_cold)
    with pytest.raises(MeasurementError, match=r"big.safetensors: this was no warm measurement and is not reported"):
        run_method(subject)


@pytest.mark.parametrize("method", PLAIN)
def test_a_tensor_with_other_bytes_is_named(fresh, subject, method):
    wrong = dataclasses.replace(subject, digests={**subject.digests, "w0": "0" * 16})
    with pytest.raises(MeasurementError, match=r"big\..*: expected tensor 'w0' with xxh3_64 0{16}, found [0-9a-f]{16}"):
        try_state(fresh, wrong, method, "as-found")


def test_the_digest_is_of_the_bytes_that_are_stored(subject):
    loaded = torch.load(subject.files[".pt"], weights_only=True)
    assert {name: digest_tensor(tensor) for name, tensor in loaded.items()} == subject.digests
    assert digest_tensor(loaded["w0"].t().contiguous().t()) == subject.digests["w0"]  # another layout, the same order
    with pytest.raises(IntegrityError, match="tensor 'few'"):
        trial.check_tensors("file", subject, {"few": loaded["few"] + 1})


@pytest.fixture
def slow_forward(monkeypatch):
    """A model whose forward pass takes 50 ms, and whose building takes 200; what they were given."""
    seen = []
    module = types.ModuleType("anchorage.loading.forward")
    module.build_empty = lambda facts, dtype: time.sleep(0.2) or facts.model
    module.first_forward = lambda model, tensors: time.sleep(0.05) or seen.append((model, set(tensors)))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def test_a_forward_pass_stands_in_the_touchs_place_and_the_bytes_are_compared_all_the_same(subject, slow_forward):
    model = dataclasses.replace(subject, model="folder")
    row = measure(model.to_json(), "load_file", "as-found", "forward")
    assert row["use"] == "forward"
    assert 0.05 <= row["first_forward_s"] < 0.2  # without building the model
    assert row["total_s"] == pytest.approx(row["load_s"] + row["first_forward_s"], abs=3e-6)
    assert row["touch_s"] > 0
    assert slow_forward == [("folder", set(subject.digests))]
    wrong = dataclasses.replace(model, digests={**subject.digests, "w0": "0" * 16})
    with pytest.raises(IntegrityError, match="tensor 'w0'"):
        measure(wrong.to_json(), "load_file", "as-found", "forward")


def test_a_touch_runs_no_model(subject, slow_forward):
    row = measure(dataclasses.replace(subject, model="folder").to_json(), "load_file", "as-found", "touch")
    assert row["first_forward_s"] is None
    assert not slow_forward


def test_a_model_runs_where_a_method_gives_the_whole_of_it(subject):
    model = dataclasses.replace(subject, model="folder")
    assert uses_of(model, "load_file") == ("touch", "forward")
    assert uses_of(model, "one-tensor") == uses_of(subject, "load_file") == ("touch",)
    assert uses_of(dataclasses.replace(model, wanted=("w0",)), "load_file") == ("touch",)


@pytest.mark.skipif(not ON_LINUX, reason="not run: waiting for a processor is counted on Linux")
def test_waiting_for_a_processor_is_counted(monkeypatch, tmp_path):
    for thread, waits in ((1, 10**9), (2, 0)):
        (tmp_path / str(thread)).mkdir()
        (tmp_path / f"{thread}/schedstat").write_text(f"7 {waits} 3")
    monkeypatch.setattr(trial, "_SCHEDULED", tmp_path)

    def wait():
        (tmp_path / "1/schedstat").write_text("9 3000000000 4")
        (tmp_path / "2/schedstat").unlink()  # a thread that ended
        (tmp_path / "3").mkdir()
        (tmp_path / "3/schedstat").write_text("1 500000000 1")

    assert trial._timed(wait)[1].wait_s == 2.5
    monkeypatch.setattr(trial, "_SCHEDULED", tmp_path / "missing")
    assert trial._timed(int)[1].wait_s is None


def test_a_method_that_is_exact_may_fetch_no_more():
    row = GOOD | {"state": "cold", "touched_bytes": 10**6}
    most = 1_050_000 + 65536
    prove(row | {"bytes_from_disk": most}, file="file", reads_all=False, exact=True)
    prove(row | {"bytes_from_disk": most + 1}, file="file", reads_all=False)
    with pytest.raises(MeasurementError, match=f"at most 1.05 times 1000000 bytes.*found {most + 1}.*loading: null"):
        prove(row | {"bytes_from_disk": most + 1}, file="file", reads_all=False, exact=True)
    assert [name for name, method in METHODS.items() if method.exact] == ["ours"]


GOOD = {"resident_before": 0.0, "bytes_from_disk": 1000, "file_bytes": 1000, "touched_bytes": 500}


@pytest.mark.parametrize(
    ("state", "reads_all", "change", "refused"),
    [
        ("cold", True, {}, None),
        ("cold", True, {"bytes_from_disk": 980}, None),
        ("cold", True, {"bytes_from_disk": 1020 + PAGESIZE}, None),
        ("cold", True, {"bytes_from_disk": 979}, "1000 bytes .within 2%, and a page more. from the disk, found 979"),
        ("cold", True, {"bytes_from_disk": 1021 + PAGESIZE}, "found"),
        ("cold", True, {"bytes_from_disk": 0}, "found 0"),
        ("cold", True, {"resident_before": 1e-9}, "nothing of it in the page cache before, found 0.0000%"),
        ("cold", True, {"resident_before": 1.0, "bytes_from_disk": 0}, "found 100.*1000 bytes.*found 0"),
        ("cold", False, {"bytes_from_disk": 490}, None),
        ("cold", False, {"bytes_from_disk": 5000}, None),
        ("cold", False, {"bytes_from_disk": 489}, "at least 98% of 500 bytes from the disk, found 489"),
        ("cold", True, {"bytes_from_disk": None}, None),
        ("cold", True, {"bytes_from_disk": None, "resident_before": 0.5}, "found 50"),
        ("warm", True, {"resident_before": 1.0, "bytes_from_disk": 0}, None),
        ("warm", False, {"resident_before": 1.0, "bytes_from_disk": None}, None),
        ("warm", True, {"resident_before": 1.0, "bytes_from_disk": 1}, "no bytes from the disk, found 1"),
        ("warm", True, {"resident_before": 1 - 1e-9, "bytes_from_disk": 0}, "the whole file in the page cache"),
        ("as-found", True, {"resident_before": 0.3, "bytes_from_disk": 7}, None),
    ],
)
def test_a_claim_is_held_to_its_numbers(state, reads_all, change, refused):
    row = {**GOOD, "state": state, **change}
    if refused is None:
        prove(row, file="file", reads_all=reads_all)
    else:
        with pytest.raises(MeasurementError, match=f"file: this was no {state} measurement.*{refused}"):
            prove(row, file="file", reads_all=reads_all)


@given(
    state=st.sampled_from(["as-found", "cold", "warm"]),
    pages=st.integers(1, 2**20),
    share=st.integers(0, 2**20),
    disk=st.none() | st.integers(0, 2**32),
    touched=st.integers(1, 2**32),
    reads_all=st.booleans(),
)
def test_no_row_is_both_cold_and_warm_and_none_of_the_two_is_half_resident(
    state, pages, share, disk, touched, reads_all
):
    resident = min(share, pages)
    row = {
        "resident_before": resident / pages,
        "bytes_from_disk": disk,
        "file_bytes": touched,
        "touched_bytes": touched,
    }
    accepted = {state for state in ("as-found", "cold", "warm") if proves(row | {"state": state}, reads_all)}
    assert "as-found" in accepted
    assert not {"cold", "warm"} <= accepted
    assert resident in {0, pages} or accepted == {"as-found"}
    assert "cold" not in accepted or disk is None or disk >= 0.98 * touched
    assert "warm" not in accepted or not disk


def proves(row, reads_all):
    try:
        prove(row, file="file", reads_all=reads_all)
    except MeasurementError:
        return False
    return True


@pytest.mark.skipif(not ON_LINUX, reason="not run: bytes from the disk are counted on Linux")
def test_a_job_measures_every_state_in_an_order_drawn_with_the_seed(subject):
    said = []
    table = run_method(subject, "torch.load-mmap", log=said.append)
    assert list(table.columns) == list(COLUMNS)
    order = list(zip(table["state"], table["use"], table["repeat"], strict=True))
    assert order == draw_states("0 big torch.load-mmap", 2, ["touch"])
    assert list(table["position"]) == [0, 1, 2, 3, 4]
    assert len(said) == 5
    assert set(table["status"]) == {"measured"}
    cold, warm = (table[table["state"] == state] for state in ("cold", "warm"))
    assert len(cold) == len(warm) == 2
    assert set(cold["cold_kind"]) <= {"cold", "guest-cold"}
    assert table[table["state"] != "cold"]["cold_kind"].isna().all()
    assert (cold["resident_before"] == 0).all()
    assert (warm["bytes_from_disk"] == 0).all()
    assert (table["filesystem"] == filesystem(subject.files[".pt"])).all()


def test_the_order_is_drawn_anew_for_every_seed_subject_and_method():
    uses = ("touch", "forward")
    orders = {tuple(draw_states(f"{seed} big load_file", 3, uses)) for seed in range(20)}
    assert len(orders) > 10
    for order in orders:
        assert order[0] == ("as-found", "touch", 0)
        assert sorted(order[1:]) == [
            (state, use, repeat)
            for state in ("cold", "warm")
            for use, n_repeats in (("forward", 1), ("touch", 3))
            for repeat in range(n_repeats)
        ]
    assert draw_states("7", 3, uses) == draw_states("7", 3, uses)


def test_a_method_whose_package_is_missing_is_not_run(subject, monkeypatch):
    monkeypatch.setitem(METHODS, "other", Method(METHODS["load_file"].load, needs=("json", "no_such_package")))
    table = run_method(subject, "other")
    assert table[["subject", "method", "status", "reason"]].to_numpy().tolist() == [
        ["big", "other", "not run", "no_such_package not installed"]
    ]
    assert table[["state", "repeat", "total_s", "resident_before"]].isna().all(axis=None)


def test_cold_is_not_run_for_a_file_in_memory(share_server):
    shared = Path("/dev/shm")
    if not shared.is_dir() or filesystem(shared) != "tmpfs":
        pytest.skip("not run: /dev/shm is no tmpfs")
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        table = run_method(build_subject(Path(folder), n_tensors=1))
    assert list(table["state"]) == ["as-found", "warm", "warm", "cold"]
    assert table.iloc[-1][["status", "reason"]].tolist() == ["not run", "tmpfs: never cold"]
    assert math.isnan(table.iloc[-1]["total_s"])
    assert (table["resident_before"][:3] == 1).all()


@pytest.fixture
def write_tables(tmp_path):
    """Tables of two subjects and methods, of weights with a model that runs; a function changes each before it is
    written."""

    def write(change=lambda table: table):
        paths = []
        for subject in ("weights", "big"):
            for method in ("ours", "load_file"):
                about = {"key": "k", "subject": subject, "method": method}
                lines = [
                    about
                    | {
                        "state": state,
                        "use": use,
                        "repeat": repeat,
                        "position": i,
                        "status": "measured",
                        "total_s": 0.5,
                    }
                    for i, (state, use, repeat) in enumerate(draw_states("", 2, uses_of(NAMED[subject], method)))
                ]
                paths.append(tmp_path / f"{subject}-{method}.csv")
                change(measuring._table(lines)).to_csv(paths[-1], index=False)
        return paths

    return write


NAMED = {
    "big": Subject("big", {}, {}, {"a": ""}, {}, ("a",)),
    "weights": Subject("weights", {}, {}, {"a": ""}, {}, ("a",), model="folder"),
}


def bring_together(paths):
    return tabulate(paths, key="k", subjects=NAMED, methods=["load_file", "ours"], repeats=2)


def not_run(table, states):
    kept = table[~table["state"].isin(states)] if states else table[:0]
    line = table[:1].assign(status="not run", reason="why", state=states[0] if states else None)
    return pd.concat([kept, line.assign(use=None, repeat=None, position=None, total_s=None)])


def test_the_table_holds_all_in_the_wanted_order(write_tables):
    table = bring_together(write_tables())
    assert list(table.columns) == list(COLUMNS)
    pairs = list(dict.fromkeys(zip(table["subject"], table["method"], strict=True)))
    assert pairs == [(subject, method) for subject in ("big", "weights") for method in ("load_file", "ours")]
    assert len(table) == 2 * 5 + 2 * 7
    assert list(table["position"]) == [*range(5)] * 2 + [*range(7)] * 2
    assert list(table["use"]).count("forward") == 2 * 2
    assert "0.0" not in table[["repeat", "position"]].to_csv(index=False)


@pytest.mark.parametrize("states", [[], ["cold"]])
def test_what_is_not_run_has_its_place_in_the_table(write_tables, states):
    table = bring_together(
        write_tables(lambda table: not_run(table, states) if table["method"].iloc[0] == "ours" else table)
    )
    assert list(table[table["method"] == "ours"]["status"]).count("not run") == 2
    assert len(table) == 5 + 7 + (4 + 5 if states else 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table[:-1],
        lambda table: pd.concat([table, table[-1:]]),
        lambda table: table.assign(repeat=0),
        lambda table: not_run(table, ["warm"]),
        lambda table: pd.concat([table, not_run(table, [])]),
        lambda table: table[table["use"] == "touch"],
        lambda table: table.assign(method="c"),
        lambda table: table.assign(subject="big"),
    ],
    ids=[
        "too few",
        "too many",
        "a repeat twice",
        "warm not run",
        "run and not run",
        "no forward",
        "another method",
        "twice one",
    ],
)
def test_a_table_that_is_not_whole_is_refused(write_tables, change):
    paths = write_tables(lambda table: change(table) if set(table["subject"]) == {"weights"} else table)
    with pytest.raises(MeasurementError, match=r"the tables of .*weights.* do not hold each wanted measurement once"):
        bring_together(paths)


def test_tables_of_another_capture_or_missing_are_refused(write_tables):
    with pytest.raises(AnchorageError, match="another"):
        bring_together(write_tables(lambda table: table.assign(key="another")))
    with pytest.raises(MeasurementError, match="weights/load_file do not hold"):
        bring_together([path for path in write_tables() if path.stem != "weights-load_file"])


def test_subjects_come_back_as_they_were_written(subject, tmp_path):
    rows = dataclasses.replace(subject, name="shard", rows=(0, 128), tier="sweep", cache="cache", wanted=("w3",))
    write_json(tmp_path / "subjects.json", {"key": "k", "subjects": [subject.to_json(), rows.to_json()]})
    assert read_subjects(tmp_path / "subjects.json") == ("k", {"big": subject, "shard": rows})
