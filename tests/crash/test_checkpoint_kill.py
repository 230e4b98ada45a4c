"""kill -9 at every stage of a training, then the same call.

Goal: whatever the moment, the training goes on from the newest checkpoint that was committed and ends with the weights
of one never killed, bit for bit. Method: train a toy model with dropout, Adam and shuffled data in a process of its
own; kill it at seeded moments from outside, or let it kill itself at a system call of a save; call it again. Oracle:
the weights of a plain loop, without the code under test, and the names in the folder.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from anchorage import checkpoint
from anchorage.checkpoint import Checkpointer
from trainings import Data, train_step

N_STEPS, EVERY = 45, 3


def build_training():
    torch.set_num_threads(1)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(128, 32))
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.01),
        "data": Data(n_samples=64, width=32, batch=16),
    }


def write_weights(folder, training):
    (folder / "final").write_bytes(b"".join(p.detach().numpy().tobytes() for p in training["model"].parameters()))


def train_plainly(folder):
    training = build_training()
    for _ in range(N_STEPS):
        train_step(training)
    write_weights(folder, training)


def train(folder, *, trap=None, endless=False, forget=None, worker=None):
    """The training under test. ``starts`` gets a line for each start, ``done`` a byte for each step done.

    An endless one stays in its last step until it gets a signal: however slow the test is, it does not come too late.
    """
    if trap is not None:
        set_trap(*trap)
    if forget is not None:
        checkpoint._RANDOM[forget] = (checkpoint._RANDOM[forget][0], lambda state: None)
    training = build_training()
    with (
        open(folder / "starts", "a", buffering=1) as starts,
        open(folder / "done", "ab", buffering=0) as done,
        Checkpointer(folder / "saved", training, every=EVERY, log=lambda line: None) as checkpoints,
    ):
        starts.write(f"{checkpoints.resumed}\n")
        if worker is not None:
            fork_worker(worker)
        for step in checkpoints.steps(N_STEPS):
            train_step(training)
            time.sleep(0.002)  # so that kills from outside are spread over steps and saves
            done.write(b".")
            while endless and step == N_STEPS - 1 and not checkpoints._signals:
                time.sleep(0.001)
    write_weights(folder, training)


def fork_worker(connection):
    """What a data loader does: a forked process that lives for its parent, and here outlives it."""
    if os.fork() == 0:
        connection.send(os.getpid())
        while True:
            signal.pause()
    connection.close()


PLACES = {  # a system call, whether the kill comes after it, and the file it is about
    "the tensors are in their temp file": ("fsync", False, r"step-\d+\.safetensors\.tmp-.*"),
    "the tensors have their name, the JSON is not begun": ("replace", True, r"step-\d+\.safetensors"),
    "the JSON is in its temp file": ("fsync", False, r"step-\d+\.json\.tmp-.*"),
    "the JSON has its name, nothing is pruned": ("replace", True, r"step-\d+\.json"),
    "one file of an old checkpoint is pruned": ("unlink", True, r"step-\d+\.json"),
}


def set_trap(place, nth):
    """Let this process kill itself when it comes to a place for the n-th time."""
    name, after, pattern = PLACES[place]
    real, seen = getattr(os, name), []

    def call(*args):
        path = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[-1])
        if re.fullmatch(pattern, Path(path).name):
            seen.append(path)
        is_it = len(seen) == nth
        if is_it and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args)
        if is_it and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, name, call)


def names(folder, pattern):
    """What a pattern's group matched in the names of the saved files, as numbers in order."""
    found = (re.fullmatch(pattern, path.name) for path in (folder / "saved").iterdir())
    return sorted(int(match[1]) for match in found if match)


def check_place(folder, place):
    committed, tensors = names(folder, r"step-(\d+)\.json"), names(folder, r"step-(\d+)\.safetensors")
    temps = [path.name for path in (folder / "saved").iterdir() if "tmp" in path.name]
    call, _, pattern = PLACES[place]
    if call == "fsync":
        assert len(temps) == 1
        assert re.fullmatch(pattern, temps[0])
    elif call == "unlink":
        assert set(tensors) - set(committed) == {committed[0] - EVERY}
    elif "JSON has" in place:
        assert committed == tensors
        assert len(committed) in (1, 3)
    else:
        assert set(tensors) - set(committed) == {tensors[-1]}
    assert bool(temps) is (call == "fsync")


@pytest.fixture(scope="module")
def start():
    """Start a function in a process of its own, forked from a server that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    # An optimizer's first step imports torch._dynamo, which takes over a second.
    context.set_forkserver_preload(["torch._dynamo", "pytest", "anchorage.checkpoint"])

    def run(function, *args, **kwargs):
        process = context.Process(target=function, args=args, kwargs=kwargs)
        process.start()
        return process

    return run


@pytest.fixture(scope="module")
def uninterrupted(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    assert ended(start(train_plainly, folder)) == 0
    return (folder / "final").read_bytes()


def ended(process):
    process.join()
    return process.exitcode


def wait_for_steps(folder, process, n):
    done = folder / "done"
    while not done.exists() or done.stat().st_size < n:
        assert process.is_alive()
        time.sleep(0.0005)


def check_the_rest(folder, start, uninterrupted):
    """The same call goes on from the newest committed step and ends as if never killed. Returns that step."""
    assert not (folder / "final").exists()
    committed = names(folder, r"step-(\d+)\.json")
    assert ended(start(train, folder)) == 0
    resumed = [int(line) for line in (folder / "starts").read_text().split()]
    assert resumed == [0, committed[-1] if committed else 0]
    assert (folder / "final").read_bytes() == uninterrupted
    assert names(folder, r"step-(\d+)\.json") == names(folder, r"step-(\d+)\.safetensors") == [42, 45]
    assert not any("tmp" in path.name for path in (folder / "saved").iterdir())
    return resumed[-1]


SEED = random.Random(20)
OUTSIDE = [(SEED.randrange(EVERY * 2, N_STEPS - EVERY), SEED.uniform(0, 0.01)) for _ in range(10)]


@pytest.mark.parametrize(("n_steps", "delay_s"), OUTSIDE, ids=[f"{n} steps, {s * 1000:.1f} ms" for n, s in OUTSIDE])
def test_killed_from_outside(start, uninterrupted, tmp_path, n_steps, delay_s):
    process = start(train, tmp_path, endless=True)
    wait_for_steps(tmp_path, process, n_steps)
    time.sleep(delay_s)
    process.kill()
    assert ended(process) == -signal.SIGKILL  # it was killed, it had not ended
    assert check_the_rest(tmp_path, start, uninterrupted) >= EVERY


@pytest.mark.parametrize("nth", [1, 7])
@pytest.mark.parametrize("place", PLACES)
def test_killed_within_a_save(start, uninterrupted, tmp_path, place, nth):
    assert ended(start(train, tmp_path, trap=(place, nth))) == -signal.SIGKILL
    check_place(tmp_path, place)
    resumed = check_the_rest(tmp_path, start, uninterrupted)
    assert (resumed > 0) is (nth > 1 or "JSON has" in place or "pruned" in place)


def test_killed_again_and_again(start, uninterrupted, tmp_path):
    for place in PLACES:
        assert ended(start(train, tmp_path, trap=(place, 2))) == -signal.SIGKILL
    assert ended(start(train, tmp_path)) == 0
    assert (tmp_path / "final").read_bytes() == uninterrupted


def test_a_resume_without_the_random_state_would_be_seen(start, uninterrupted, tmp_path):
    assert ended(start(train, tmp_path, trap=("the JSON is in its temp file", 5))) == -signal.SIGKILL
    assert ended(start(train, tmp_path, forget="torch")) == 0
    assert (tmp_path / "final").read_bytes() != uninterrupted


def test_sigterm_saves_the_step_at_work_and_ends_with_143(start, uninterrupted, tmp_path):
    process = start(train, tmp_path, endless=True)
    wait_for_steps(tmp_path, process, 10)
    process.terminate()
    assert ended(process) == 143
    assert names(tmp_path, r"step-(\d+)\.json")[-1] == (tmp_path / "done").stat().st_size
    check_the_rest(tmp_path, start, uninterrupted)


def test_a_forked_worker_neither_holds_the_folder_nor_ignores_sigterm(start, uninterrupted, tmp_path):
    ours, theirs = multiprocessing.Pipe()
    process = start(train, tmp_path, endless=True, worker=theirs)
    theirs.close()
    worker = ours.recv()
    wait_for_steps(tmp_path, process, 5)
    process.kill()
    process.join()
    try:
        check_the_rest(tmp_path, start, uninterrupted)
        assert not ours.poll()  # the worker lived on while the training was run again
    finally:
        os.kill(worker, signal.SIGTERM)
    with contextlib.suppress(EOFError):
        ours.recv()  # its end closes when it ends: a worker that ignored the signal would leave us waiting
        pytest.fail("the worker is not to send more")
