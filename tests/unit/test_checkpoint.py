"""The durable training state, bit by bit.

Goal: a state comes back exactly or an error says why not; a flipped bit anywhere is found and the checkpoint before is
used; a training that stops and goes on ends with the weights of one that never stopped. Method: save, damage, load.
Oracle: the objects themselves, the safetensors library, and a plain loop without the code under test.
"""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import random
import shutil
import signal
import struct
import threading
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from anchorage import checkpoint
from anchorage.checkpoint import Checkpointer
from anchorage.durable import temp_path
from anchorage.errors import AnchorageError, IntegrityError
from trainings import Data, train_step

N_STEPS = 12


class Holder:
    """An object whose state is a value."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def build_training(make_optimizer=torch.optim.Adam, make_scheduler=None):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 6)
    )
    optimizer = make_optimizer(model.parameters(), lr=0.01)
    training = {"model": model, "optimizer": optimizer, "data": Data(n_samples=32, width=6, batch=8)}
    if make_scheduler is not None:
        training["scheduler"] = make_scheduler(optimizer)
    return training


def weights_of(training):
    return {name: tensor.numpy().tobytes() for name, tensor in training["model"].state_dict().items()}


def train(folder, training, *, until=N_STEPS, n=N_STEPS, every=3, log=print, **options):
    """Train with checkpoints; leave without a word when ``until`` steps are done. Returns the step resumed at."""
    with Checkpointer(folder, training, every=every, log=log, **options) as checkpoints:
        for step in checkpoints.steps(n):
            if step == until:
                break
            train_step(training)
        return checkpoints.resumed


def save(folder, state, **options):
    holder = Holder()
    with Checkpointer(folder, {"thing": holder}, every=1, **options) as checkpoints:
        for _ in checkpoints.steps(checkpoints.resumed + 1):
            holder.state = state


def reopen(folder, log=print, **options):
    holder = Holder()
    with Checkpointer(folder, {"thing": holder}, every=1, log=log, **options) as checkpoints:
        return holder.state, checkpoints.resumed


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def bits(value):
    """A value as nested tuples in which nothing that differs is equal."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return ("tensor", value.dtype, tuple(value.shape), bytes(plain.view(torch.uint8).numpy()))
    if isinstance(value, np.ndarray | np.generic):
        return (type(value), value.dtype, value.shape, value.tobytes())
    if isinstance(value, float):
        return (type(value), "nan" if math.isnan(value) else struct.pack(">d", value))
    if isinstance(value, dict):
        return (type(value), [(bits(key), bits(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [bits(item) for item in value])
    return (type(value), value)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two threads for matrices this small wait for each other, and longer the busier the machine."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def uninterrupted():
    training = build_training()
    for _ in range(N_STEPS):
        train_step(training)
    return weights_of(training)


# --- what comes back

PLAIN = {
    "numbers": [0, -1, 2**63, 2**64, -(2**200), 10**5000, 1.5, -0.0, 5e-324, math.inf, -math.inf, math.nan],
    "text": ["", "é", "a.b", "\ud800", "line\n"],
    "flags": (True, False, None),
    "int and str keys": {0: "a", "0": "b", -5: "c", 2**70: "d"},
    "nothing": [[], (), {}, OrderedDict(), Counter()],
    "kinds": [OrderedDict(b=1, a=2), Counter({3: 2}), {"tensor": "x", "dict": [1]}, {"int": "0x5"}],
    "arrays": [np.arange(6, dtype=np.uint32).reshape(2, 3).T, np.array(5.5), np.zeros((0, 2)), np.array([True])],
    "scalars": [np.float64(0.1), np.int64(-3), np.float32(0.1), np.bool_(True), np.complex128(1j)],
}


def test_plain_states_come_back_exactly(tmp_path):
    save(tmp_path, PLAIN)
    assert bits(reopen(tmp_path)[0]) == bits(PLAIN)
    assert bits(PLAIN["kinds"]) != bits([{"b": 1, "a": 2}, {3: 2}, *PLAIN["kinds"][2:]])  # control: bits() sees kinds


DTYPES = [torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128]
DTYPES += [getattr(torch, f"{sign}int{n}") for sign in ("", "u") for n in (8, 16, 32, 64)]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex32]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_every_dtype_and_shape_come_back_exactly(tmp_path):
    state = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (24 * dtype.itemsize,), dtype=torch.uint8)
        whole = raw.view(dtype)
        state[str(dtype)] = [whole.reshape(2, 3, 4), whole[5], whole[:0].reshape(0, 7), whole.reshape(4, 6).t()]
    save(tmp_path, state)
    assert bits(reopen(tmp_path)[0]) == bits(state)


def test_views_come_back_exactly_and_dense_ones_in_their_order(tmp_path):
    base = torch.randn(2, 3, 4, 5)
    dense = {"channels last": base.to(memory_format=torch.channels_last), "permuted": base.permute(3, 1, 0, 2)}
    other = {
        "slice": base[:, 1:, ::2],
        "overlap": [base.reshape(-1)[2:9], base.reshape(-1)[4:7]],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 50),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    save(tmp_path, dense | other)
    state, _ = reopen(tmp_path)
    assert bits(state) == bits(dense | other)
    assert {name: state[name].stride() for name in dense} == {name: dense[name].stride() for name in dense}


def test_a_tensor_met_twice_is_stored_once_and_comes_back_as_one(tmp_path):
    tied, twin = torch.randn(4, 4), torch.nn.Linear(4, 4, bias=False)
    save(tmp_path, {"a": tied, "b": [tied.detach()], "c": tied.clone(), "empty": [torch.ones(0), torch.ones(0)]})
    state, _ = reopen(tmp_path)
    assert state["empty"][0] is not state["empty"][1]
    assert state["a"] is state["b"][0]
    assert state["a"] is not state["c"]
    with safe_open(tmp_path / "step-000000001.safetensors", "pt") as file:
        names = {name for name in file.keys() if name.startswith("thing")}  # noqa: SIM118
        assert names == {"thing.a", "thing.c", "thing.empty.0", "thing.empty.1"}
    model = torch.nn.Sequential(twin, torch.nn.Linear(4, 4, bias=False))
    model[1].weight = twin.weight
    with Checkpointer(tmp_path / "tied", {"model": model}, every=1) as checkpoints:
        list(checkpoints.steps(1))
    before = twin.weight.detach().clone()
    twin.weight.data.zero_()
    with Checkpointer(tmp_path / "tied", {"model": model}, every=1):
        assert torch.equal(model[1].weight, before)
        assert model[1].weight is twin.weight


def test_tensors_made_for_the_state_alone_are_not_taken_for_each_other(tmp_path):
    class Fresh(Holder):
        def state_dict(self):
            return {"x": torch.full((1000,), self.state)}

    things = {f"thing {n}": Fresh(float(n)) for n in range(20)}  # the allocator gives the same address again
    with Checkpointer(tmp_path, things, every=1) as checkpoints:
        list(checkpoints.steps(1))
    again = {name: Holder() for name in things}
    with Checkpointer(tmp_path, again, every=1):
        assert [holder.state["x"][0].item() for holder in again.values()] == list(range(20))


def test_names_that_meet_or_are_reserved(tmp_path):
    things = {"a": Holder({"b.c": torch.ones(1), "b": {"c": torch.zeros(1)}}), "__metadata__": Holder(torch.ones(2))}
    things["a.b"] = Holder({"c": torch.ones(3), "\ud800": torch.ones(4)})
    with Checkpointer(tmp_path, things, every=1) as checkpoints:
        list(checkpoints.steps(1))
    again = {name: Holder() for name in things}
    with Checkpointer(tmp_path, again, every=1):
        assert all(bits(again[name].state) == bits(things[name].state) for name in things)


def test_the_versions_of_a_models_modules_come_back(tmp_path):
    state = torch.nn.BatchNorm1d(3).state_dict()
    save(tmp_path, {"model": state})
    assert reopen(tmp_path)[0]["model"]._metadata == state._metadata


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(DTYPES[:5]).flatmap(
        lambda dtype: st.lists(st.integers(0, 100), max_size=3).map(lambda n: torch.tensor(n, dtype=dtype))
    )
)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.integers() | st.text(st.characters(), max_size=5), inner, max_size=4)
    ),
)


@given(STATES)
@settings(max_examples=60, deadline=None)
def test_any_nested_state_comes_back_exactly(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("any")
    save(folder, state, log=lambda line: None)
    assert bits(reopen(folder, log=lambda line: None)[0]) == bits(state)


CYCLE: list = []
CYCLE.append(CYCLE)
REFUSED = {
    "object": object(),
    "set": {1},
    "bytes": b"x",
    "function": len,
    "float key": {1.5: 1},
    "flag key": {True: 1},
    "tuple key": {(1, 2): 1},
    "subclass of dict": type("Mine", (dict,), {})(),
    "named tuple": namedtuple("Pair", "a b")(1, 2),
    "subclass of tensor": torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
    "sparse tensor": torch.ones(2, 2).to_sparse(),
    "meta tensor": torch.ones(2, device="meta"),
    "array of objects": np.array([object()]),
    "array of text": np.array(["a"]),
    "array of the other byte order": np.array([1, 2], dtype=">i4"),
    "itself": CYCLE,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stored_is_refused_with_its_path(tmp_path, name):
    save(tmp_path, "before")
    with pytest.raises(AnchorageError, match=r"thing\.a\.1\S*: a \w+ cannot be stored"):
        save(tmp_path, {"a": (0, REFUSED[name])}, log=lambda line: None)
    assert reopen(tmp_path) == ("before", 1)


def test_the_files_are_safetensors_and_json_and_their_digests_are_xxh3(tmp_path):
    save(tmp_path, {"w": torch.arange(3)}, identity={"seed": 1})
    with safe_open(tmp_path / "step-000000001.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("thing.w"), torch.arange(3))
    text = (tmp_path / "step-000000001.json").read_bytes()
    body = json.loads(text)
    data = (tmp_path / "step-000000001.safetensors").read_bytes()
    assert next(iter(body)) == "xxh3_128"
    start = text.index(body["xxh3_128"].encode()) + 32
    assert body["xxh3_128"] == xxhash.xxh3_128_hexdigest(text[start:])
    assert (body["format"], body["step"], body["identity"]["seed"]) == ("anchorage-checkpoint-1", 1, 1)
    assert (body["tensors_bytes"], body["tensors_xxh3_128"]) == (len(data), xxhash.xxh3_128_hexdigest(data))


# --- damage


def flip(path, index, bit=1):
    data = bytearray(path.read_bytes())
    data[index] ^= bit
    path.write_bytes(data)


@pytest.fixture
def two_checkpoints(tmp_path):
    folder = tmp_path / "training"
    for state in ("first", {"second": torch.arange(9)}):
        save(folder, state)
    assert files(folder) == [f"step-{n:09d}.{suffix}" for n in (1, 2) for suffix in ("json", "safetensors")]
    return folder


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_flipped_bit_anywhere_is_found_and_the_checkpoint_before_is_used(two_checkpoints, tmp_path, suffix):
    name, lines = f"step-000000002.{suffix}", []
    whole = (two_checkpoints / name).read_bytes()
    assert len(whole) > 5000
    indices = [*range(80), *range(80, len(whole), 64), len(whole) - 1]
    for index in indices:
        folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
        flip(folder / name, index, 1 << index % 8)
        assert reopen(folder, log=lines.append) == ("first", 1), index
        shutil.rmtree(folder)
    assert sum(name in line and "expected" in line and "found" in line for line in lines) == len(indices)
    assert reopen(two_checkpoints)[1] == 2  # control: without a flip the second is used


def cut(path, n):
    path.write_bytes(path.read_bytes()[:n])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b" ")


JSON, TENSORS = "step-000000002.json", "step-000000002.safetensors"
DAMAGES = {
    **{f"JSON cut at {n}": lambda folder, n=n: cut(folder / JSON, n) for n in (0, 1, 14, 46, 500, -1)},
    **{f"tensors cut at {n}": lambda folder, n=n: cut(folder / TENSORS, n) for n in (0, 1, 8, 500, -1)},
    "no tensors": lambda folder: (folder / TENSORS).unlink(),
    "tensors longer": lambda folder: lengthen(folder / TENSORS),
    "JSON longer": lambda folder: lengthen(folder / JSON),
    "tensors of another step": lambda folder: shutil.copy(folder / "step-000000001.safetensors", folder / TENSORS),
    "JSON of another step": lambda folder: shutil.copy(folder / "step-000000001.json", folder / JSON),
    "both of another step": lambda folder: [
        shutil.copy(folder / name.replace("2", "1"), folder / name) for name in (JSON, TENSORS)
    ],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_said_and_removed(two_checkpoints, damage):
    DAMAGES[damage](two_checkpoints)
    lines: list[str] = []
    assert reopen(two_checkpoints, log=lines.append) == ("first", 1)
    assert "step-000000002" in lines[0]
    assert "expected" in lines[0]
    assert lines[1] == f"resumed at step 1 of {two_checkpoints}, and removed the damaged [2]"
    assert files(two_checkpoints) == ["step-000000001.json", "step-000000001.safetensors"]
    save(two_checkpoints, "third")
    assert reopen(two_checkpoints) == ("third", 2)


@pytest.mark.parametrize("name", [JSON, TENSORS])
def test_a_file_that_the_disk_cannot_read_is_damage(two_checkpoints, monkeypatch, name):
    read = Path.read_bytes

    def refuse(error):
        def read_bytes(path):
            if path.name == name:
                raise OSError(error, os.strerror(error), str(path))
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)

    refuse(errno.EACCES)
    with pytest.raises(PermissionError):  # of another kind: it may be whole, and stays
        reopen(two_checkpoints)
    assert {JSON, TENSORS} <= set(files(two_checkpoints))
    monkeypatch.undo()
    refuse(errno.EIO)
    lines: list[str] = []
    assert reopen(two_checkpoints, log=lines.append) == ("first", 1)
    assert f"{name}: expected a file that can be read, found {os.strerror(errno.EIO)}" in lines[0]
    assert lines[1].endswith("and removed the damaged [2]")


def test_where_none_is_whole_an_error_says_so_and_nothing_is_removed(two_checkpoints):
    for n in (1, 2):
        flip(two_checkpoints / f"step-{n:09d}.json", 100)
    before = files(two_checkpoints)
    for _ in range(2):
        with pytest.raises(IntegrityError, match=rf"No checkpoint of 2 is whole: remove {two_checkpoints}") as caught:
            reopen(two_checkpoints)
        assert caught.value.file.name == "step-000000002.json"
        assert files(two_checkpoints) == before


def test_a_damaged_newest_checkpoint_costs_only_steps(tmp_path, uninterrupted):
    train(tmp_path, build_training(), until=11)
    flip(tmp_path / "step-000000009.safetensors", 3000)
    training = build_training()
    assert train(tmp_path, training) == 6
    assert weights_of(training) == uninterrupted


# --- another training


def test_another_identity_is_refused_by_the_names_of_its_facts(two_checkpoints):
    save(two_checkpoints.parent / "known", 1, identity={"seed": 1, "same": [1, {"x": None}], "gone": None})
    with pytest.raises(AnchorageError) as caught:
        reopen(two_checkpoints.parent / "known", identity={"seed": 2, "same": [1, {"x": None}], "new": 0})
    message = str(caught.value)
    assert all(word in message for word in ("seed is 1 there, 2 here", "gone", "new", "remove it"))
    assert "same" not in message
    with pytest.raises(AnchorageError, match=r"\['thing'\] there, \['other', 'thing'\] here"):
        Checkpointer(two_checkpoints, {"thing": Holder(), "other": Holder()}, every=1).__enter__()
    assert reopen(two_checkpoints)[1] == 2  # the lock was let go


def test_another_format_is_refused_not_removed(two_checkpoints):
    path = two_checkpoints / "step-000000002.json"
    rest = path.read_bytes()[46:].replace(b"anchorage-checkpoint-1", b"anchorage-checkpoint-2")
    path.write_bytes(b'{"xxh3_128": "' + xxhash.xxh3_128_hexdigest(rest).encode() + rest)
    with pytest.raises(AnchorageError, match="anchorage-checkpoint-2"):
        reopen(two_checkpoints)
    assert path.exists()


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 1, "keep": 1}])
def test_arguments_that_make_no_sense(tmp_path, options):
    with pytest.raises(AnchorageError, match="at least"):
        Checkpointer(tmp_path, {}, **options)


def test_an_object_without_a_state_and_steps_without_the_lock(tmp_path):
    with pytest.raises(AnchorageError, match=r"data cannot be saved.*state_dict"):
        Checkpointer(tmp_path, {"data": iter([])}, every=1)
    checkpoints = Checkpointer(tmp_path, {}, every=1)
    with pytest.raises(AnchorageError, match="with"):
        next(checkpoints.steps(1))
    with checkpoints:
        pass
    with pytest.raises(AnchorageError, match="with"):
        next(checkpoints.steps(1))


def test_two_trainers_cannot_share_a_folder(tmp_path):
    other = Checkpointer(tmp_path, {}, every=1)
    with Checkpointer(tmp_path, {}, every=1), pytest.raises(AnchorageError, match=f"trains in {tmp_path}"):
        other.__enter__()
    with Checkpointer(tmp_path, {}, every=1):
        pass


# --- what stays in the folder


def test_what_a_kill_left_is_swept_and_nothing_else(two_checkpoints):
    whole = files(two_checkpoints)
    orphan = two_checkpoints / "step-000000003.safetensors"
    for path in (orphan, temp_path(orphan), temp_path(orphan.with_suffix(".json"))):
        path.write_bytes(b"torn")
    foreign = ["notes.txt", "step-final.safetensors", "weights.safetensors"]
    for name in foreign:
        (two_checkpoints / name).write_bytes(b"mine")
    reopen(two_checkpoints)
    assert files(two_checkpoints) == sorted(whole + foreign)


@pytest.mark.parametrize("keep", [2, 3])
def test_the_newest_stay(tmp_path, keep):
    with Checkpointer(tmp_path, {}, every=3, keep=keep) as checkpoints:
        for step in checkpoints.steps(11):
            saved = [n for n in (3, 6, 9) if n <= step][-keep:]
            assert files(tmp_path) == [f"step-{n:09d}.{suffix}" for n in saved for suffix in ("json", "safetensors")]
    assert [name for name in files(tmp_path) if "json" in name] == [f"step-{n:09d}.json" for n in (3, 6, 9, 11)[-keep:]]


@pytest.mark.parametrize("n_syncs", range(5))
def test_a_write_error_is_raised_and_the_checkpoint_before_stays(two_checkpoints, monkeypatch, n_syncs):
    real, seen = os.fsync, []

    def fail(descriptor):
        seen.append(descriptor)
        if len(seen) > n_syncs + 1:  # the first is of the folder, on entering
            raise OSError(5, "planted")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="planted"):
            save(two_checkpoints, "third")
    assert not any("tmp" in name for name in files(two_checkpoints))
    # Where only the last folder's fsync failed the new one stands, whole, though it was not acknowledged.
    assert reopen(two_checkpoints)[1] == (2 if n_syncs < 3 else 3)


# --- going on


@pytest.mark.parametrize("stops", [[0], [1], [3], [4], [11], [2, 5, 5, 8], list(range(N_STEPS))])
def test_stopped_and_run_again_it_ends_as_if_never_stopped(tmp_path, uninterrupted, stops):
    for stop in stops:
        train(tmp_path, build_training(), until=stop)
    training = build_training()
    assert train(tmp_path, training) == stops[-1] // 3 * 3
    assert weights_of(training) == uninterrupted
    done = build_training()
    assert train(tmp_path, done, until=0) == N_STEPS  # nothing is left to do: no step 0 comes to break at
    assert weights_of(done) == uninterrupted


@pytest.mark.parametrize("source", ["python", "numpy", "torch", "optimizer", "data"])
def test_a_resume_that_forgets_something_would_be_seen(tmp_path, monkeypatch, uninterrupted, source):
    train(tmp_path, build_training(), until=8)
    training = build_training()
    if source in checkpoint._RANDOM:
        monkeypatch.setitem(checkpoint._RANDOM, source, (checkpoint._RANDOM[source][0], lambda state: None))
    else:
        monkeypatch.setattr(training[source], "load_state_dict", lambda state: None)
    assert train(tmp_path, training) == 6
    assert weights_of(training) != uninterrupted


def test_draws_between_entering_and_the_first_step_change_nothing(tmp_path, uninterrupted):
    train(tmp_path, build_training(), until=8)
    training = build_training()
    with Checkpointer(tmp_path, training, every=3) as checkpoints:
        torch.rand(5), random.random(), np.random.rand()
        for _ in checkpoints.steps(N_STEPS):
            train_step(training)
    assert weights_of(training) == uninterrupted


def test_two_loops_go_on_from_each_other(tmp_path, uninterrupted):
    training = build_training()
    with Checkpointer(tmp_path, training, every=100) as checkpoints:
        seen = [step for n in (4, 4, N_STEPS) for step in checkpoints.steps(n) if train_step(training) is None]
    assert seen == list(range(N_STEPS))
    assert weights_of(training) == uninterrupted


def test_fewer_steps_than_are_done_are_said_to_be(tmp_path):
    said: dict[int, list[str]] = {n: [] for n in (6, 5)}
    train(tmp_path, build_training(), n=6, until=6)
    for n, lines in said.items():
        training = build_training()
        assert train(tmp_path, training, n=n, log=lines.append) == 6
    assert len(said[6]) == 1  # resumed; all is done
    assert said[5][1] == f"no step up to 5 is left: {tmp_path} is at step 6, and so are the objects"


def test_an_error_in_a_step_saves_nothing_of_it(tmp_path):
    def fail():
        with Checkpointer(tmp_path, {}, every=2) as checkpoints:
            for step in checkpoints.steps(10):
                step // (3 - step)

    with pytest.raises(ZeroDivisionError):
        fail()
    assert files(tmp_path) == ["step-000000002.json", "step-000000002.safetensors"]


MAKE_BITS = {kind.__name__: kind for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)}


@pytest.mark.parametrize("bit_generator", MAKE_BITS)
def test_generators_go_on_where_they_were(tmp_path, bit_generator):
    def build():
        return {"numpy": np.random.Generator(MAKE_BITS[bit_generator](7)), "torch": torch.Generator().manual_seed(7)}

    generators, draws = build(), []
    with Checkpointer(tmp_path, generators, every=1) as checkpoints:
        for _ in checkpoints.steps(2):
            generators["numpy"].standard_normal(3, dtype=np.float32), torch.randn(3, generator=generators["torch"])
        draws.append((generators["numpy"].random(), torch.rand(1, generator=generators["torch"]).item()))
    generators = build()
    with Checkpointer(tmp_path, generators, every=1):
        draws.append((generators["numpy"].random(), torch.rand(1, generator=generators["torch"]).item()))
    assert draws[0] == draws[1]
    fresh = build()
    assert draws[0] != (fresh["numpy"].random(), torch.rand(1, generator=fresh["torch"]).item())


def test_the_state_of_cuda_devices_in_use_is_saved_and_set(tmp_path, monkeypatch):
    states, got = [torch.arange(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)], []
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
        save(tmp_path, "any")
    monkeypatch.setitem(checkpoint._RANDOM, "cuda", (checkpoint._RANDOM["cuda"][0], got.extend))
    save(tmp_path, "any")
    assert bits(got) == bits(states)


OPTIMIZERS = {
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "AdamW": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, amsgrad=True),
    "Adam, lr a tensor": lambda parameters, lr: torch.optim.Adam(parameters, lr=torch.tensor(lr), foreach=False),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
}
schedulers = torch.optim.lr_scheduler
SCHEDULERS = {
    "none": None,
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 5, 5, 9]),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=N_STEPS + 1),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer), schedulers.CosineAnnealingLR(optimizer, 8)], [4]
    ),
}
PAIRS = [(optimizer, "StepLR") for optimizer in OPTIMIZERS] + [("SGD", scheduler) for scheduler in SCHEDULERS]


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_torchs_optimizers_and_schedulers_go_on(tmp_path, optimizer, scheduler):
    make = OPTIMIZERS[optimizer], SCHEDULERS[scheduler]
    plain = build_training(*make)
    for _ in range(N_STEPS):
        train_step(plain)
    train(tmp_path, build_training(*make), until=8)
    training = build_training(*make)
    assert train(tmp_path, training) == 6
    assert weights_of(training) == weights_of(plain)
    assert bits(training["optimizer"].state_dict()) == bits(plain["optimizer"].state_dict())


# --- SIGTERM (in a process of its own: tests/crash/test_checkpoint_kill.py)


def test_sigterm_ends_the_step_at_work_saves_and_ends_with_143(tmp_path, uninterrupted):
    training, old, lines = build_training(), signal.getsignal(signal.SIGTERM), []

    def run():
        with Checkpointer(tmp_path, training, every=100, log=lines.append) as checkpoints:
            for step in checkpoints.steps(N_STEPS):
                if step == 4:
                    signal.raise_signal(signal.SIGTERM)
                train_step(training)

    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is old
    assert lines == [f"SIGTERM: saved step 5 in {tmp_path}, ending"]
    again = build_training()
    assert train(tmp_path, again) == 5
    assert weights_of(again) == uninterrupted


def test_sigterm_after_the_last_step_is_not_lost(tmp_path):
    old = signal.getsignal(signal.SIGTERM)

    def run():
        with Checkpointer(tmp_path, {}, every=1) as checkpoints:
            list(checkpoints.steps(1))
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is old


def test_an_error_on_entering_leaves_no_handler_and_no_lock(two_checkpoints):
    old = signal.getsignal(signal.SIGTERM)
    with pytest.raises(AnchorageError):
        reopen(two_checkpoints, identity={"seed": 1})
    assert signal.getsignal(signal.SIGTERM) is old
    assert reopen(two_checkpoints)[1] == 2


def test_outside_the_main_thread_it_trains_without_a_handler(tmp_path):
    old, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with Checkpointer(tmp_path, {}, every=1) as checkpoints:
            seen.extend([signal.getsignal(signal.SIGTERM), *checkpoints.steps(2)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [old, 0, 1]


def test_copies_are_taken_so_a_later_step_cannot_reach_a_saved_state(tmp_path):
    tensor = torch.zeros(3)
    with Checkpointer(tmp_path, {"thing": Holder({"x": tensor})}, every=1) as checkpoints:
        for _ in checkpoints.steps(2):
            tensor += 1
    before = copy.deepcopy(reopen(tmp_path)[0])
    tensor += 5
    assert bits(reopen(tmp_path)[0]) == bits(before) == bits({"x": torch.full((3,), 2.0)})
