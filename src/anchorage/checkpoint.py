"""Durable, resumable training state: kill a training loop at any moment, run it again, and get the same weights.

A checkpoint is two files. ``step-000000100.safetensors`` holds every tensor; ``step-000000100.json``, written last, is
the commit point: the step, the caller's identity, the tensors file's size and xxh3_128, and the states with the
tensors' names. It opens with the digest of all that follows, so a flipped bit in either file is found, and nothing
damaged is parsed. No pickle: nothing in a checkpoint can run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import safetensors.torch
import torch
from torch import cuda

from anchorage.digest import canonical_json, digest_bytes
from anchorage.durable import is_temp, make_folder, remove_file, sync_folder, write_bytes
from anchorage.errors import AnchorageError, IntegrityError
from anchorage.statetree import StateTree, decode_state

CHECKPOINT_FORMAT = "anchorage-checkpoint-1"
_NAME = re.compile(r"step-(\d{9,})\.(json|safetensors)")
_REMEDY = "The checkpoint before it is tried."
_SEAL, _SEAL_BYTES = '{"xxh3_128": "', 14 + 32
# How to read a state, and how to set it. CUDA's are read only once it is in use: asking earlier would set it up.
_Access = tuple[Callable[[], Any], Callable[[Any], Any]]
_RANDOM: dict[str, _Access] = {
    "python": (random.getstate, random.setstate),
    "numpy": (lambda: np.random.get_state(legacy=False), np.random.set_state),
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "cuda": (lambda: cuda.get_rng_state_all() if cuda.is_initialized() else [], cuda.set_rng_state_all),
}


class Checkpointer:
    """Saves a training's state every few steps and goes on from the newest whole one. Used in a ``with`` statement.

    Entering locks the folder, sweeps what a kill left there, and loads the objects; :meth:`steps` saves. The state of
    ``random``, ``numpy.random`` and torch's CPU and CUDA generators is saved too, and set as the first step begins.
    SIGTERM lets the step at work end, saves, and raises SystemExit(143); outside the main thread nothing catches it.
    Not saved: gradients kept from step to step, train or eval mode, loader workers, sharded states.

    Args:
        folder: of this training alone; made where missing.
        objects: by name, what has ``state_dict()`` and ``load_state_dict()`` (it gets tensors on the CPU), or is a
            ``torch.Generator`` or ``numpy.random.Generator``. Loaded in this order.
        every: steps from one checkpoint to the next; the last step is always saved.
        keep: how many checkpoints stay, at least 2: the newest, and one to fall back to.
        identity: JSON facts that must be equal for a resume to make sense (data, seed, settings).
        log: takes a line of text: what was resumed, found damaged, removed.

    Raises:
        AnchorageError: an argument is wrong; on entering, another process holds the folder, or it has another identity.
        IntegrityError: on entering, there are checkpoints and none is whole. Nothing is removed then.
    """

    def __init__(
        self,
        folder: Path | str,
        objects: Mapping[str, Any],
        *,
        every: int,
        keep: int = 2,
        identity: Mapping[str, Any] | None = None,
        log: Callable[[str], object] = print,
    ) -> None:
        if every < 1 or keep < 2:
            raise AnchorageError(f"every must be at least 1 and keep at least 2 (a fall-back), not {every} and {keep}")
        self.folder, self.every, self.keep, self._log = Path(folder), every, keep, log
        self.resumed = self._step = 0  # how many steps were done when the folder was entered, and are now
        self._objects = {name: _access(name, thing) for name, thing in objects.items()}
        self._identity = json.loads(canonical_json({**(identity or {}), "names of objects": sorted(objects)}))
        self._random: dict[str, Any] = {}
        self._signals: list[int] = []
        self._held: contextlib.ExitStack | None = None

    def __enter__(self) -> Self:
        make_folder(self.folder)
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context(open(self.folder / "lock", "ab"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel's: it ends with its holder
            except BlockingIOError:
                raise AnchorageError(f"another process trains in {self.folder}: wait, or use another folder") from None
            self._load()
            if threading.current_thread() is threading.main_thread():
                old = signal.signal(signal.SIGTERM, lambda number, _: self._signals.append(number))
                stack.callback(signal.signal, signal.SIGTERM, old or signal.SIG_DFL)
            self._held = stack.pop_all()
        # A forked loader worker must end when told to, and not hold the folder once the trainer is killed.
        os.register_at_fork(after_in_child=self._held.close)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._held is not None:
            self._held.close()
        self._held = None
        if kind is None and self._signals:  # it came after the last step
            raise SystemExit(128 + signal.SIGTERM)

    def steps(self, n: int) -> Iterator[int]:
        """Yield the numbers of the steps still to do, up to ``n - 1``; save after every ``every``-th and the last.

        Leaving the loop early, by ``break`` or an error, saves nothing: the step at work may be half done. Where more
        than ``n`` steps are done already none is left, and the log says so: the objects are those of a later step.

        Raises:
            OSError: a checkpoint could not be written; those before it stand.
            AnchorageError: a state holds what cannot be stored; the message has its path.
        """
        if self._held is None:
            raise AnchorageError("steps() needs the folder's lock: call it inside `with Checkpointer(...)`")
        for name, state in self._random.items():
            _RANDOM[name][1](state)
        self._random = {}
        if n < self._step:
            self._log(f"no step up to {n} is left: {self.folder} is at step {self._step}, and so are the objects")
        while self._step < n:
            yield self._step
            self._step += 1
            stop = bool(self._signals)  # read once: one that comes while saving waits for the next step
            if stop or self._step == n or self._step % self.every == 0:
                self._save()
            if stop:
                self._log(f"SIGTERM: saved step {self._step} in {self.folder}, ending")
                raise SystemExit(128 + signal.SIGTERM)

    def _save(self) -> None:
        tree = StateTree()
        objects = {name: tree.encode(read(), (name,)) for name, (read, _) in self._objects.items()}
        states = {name: tree.encode(read(), ("random", name)) for name, (read, _) in _RANDOM.items()}
        data = safetensors.torch.save(tree.tensors)
        body = {"format": CHECKPOINT_FORMAT, "step": self._step, "identity": self._identity}
        body |= {"tensors_bytes": len(data), "tensors_xxh3_128": digest_bytes(data), "layouts": tree.layouts}
        body |= {"random": states, "objects": objects}
        rest = ('", ' + json.dumps(body, allow_nan=False)[1:] + "\n").encode()
        write_bytes(self._path(self._step, "safetensors"), data)
        write_bytes(self._path(self._step, "json"), f"{_SEAL}{digest_bytes(rest)}".encode() + rest)
        self._remove(self._found_steps()[: -self.keep])

    def _load(self) -> None:
        for path in self.folder.glob("step-*"):  # a kill leaves temp files, and tensors that no JSON file committed
            if is_temp(path) or (_NAME.fullmatch(path.name) and not path.with_suffix(".json").exists()):
                remove_file(path)
        faults: dict[int, IntegrityError] = {}
        for step in reversed(self._found_steps()):
            try:
                body, tensors = self._read(step)
            except IntegrityError as fault:
                self._log(str(fault))
                faults[step] = fault
                continue
            there, here = body["identity"], self._identity
            if there != here:
                keys = [key for key in {**there, **here} if there.get(key, ...) != here.get(key, ...)]
                facts = "; ".join(f"{key} is {there.get(key)!r} there, {here.get(key)!r} here" for key in keys)
                raise AnchorageError(f"{self.folder} holds another training: {facts}. Use another, or remove it.")
            for name, (_, write) in self._objects.items():
                write(decode_state(body["objects"][name], tensors))
            self._random = {name: decode_state(state, tensors) for name, state in body["random"].items()}
            self.resumed = self._step = step
            damaged = f", and removed the damaged {[*faults]}" if faults else ""
            self._remove(faults)  # or they would stand before every later checkpoint
            self._log(f"resumed at step {step} of {self.folder}{damaged}")
            return
        if faults:
            remedy = f"No checkpoint of {len(faults)} is whole: remove {self.folder} to start anew."
            newest = next(iter(faults.values()))
            raise IntegrityError(newest.file, expected=newest.expected, found=newest.found, remedy=remedy)

    def _read(self, step: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """A checkpoint's body and tensors; IntegrityError unless every byte of both files is as written."""
        file = self._path(step, "json")
        data = _read_bytes(file)
        _expect(file, f"{_SEAL}{digest_bytes(data[_SEAL_BYTES:])}", data[:_SEAL_BYTES].decode(errors="replace"))
        body = json.loads(data)
        if body["format"] != CHECKPOINT_FORMAT:
            raise AnchorageError(f"{file} has format {body['format']!r}; this version reads {CHECKPOINT_FORMAT!r} only")
        _expect(file, f"step {step}", f"step {body['step']}")
        file = self._path(step, "safetensors")
        data = _read_bytes(file) if file.exists() else b""
        _expect(file, f"{body['tensors_bytes']} bytes", f"{len(data)} bytes")
        _expect(file, body["tensors_xxh3_128"], digest_bytes(data))
        tensors = safetensors.torch.load(data)
        for name, (dtype, shape, stride) in body["layouts"].items():
            plain = tensors[name].view(getattr(torch, dtype)).reshape(shape)
            is_so = list(plain.stride()) == stride
            tensors[name] = plain if is_so else torch.empty_strided(shape, stride, dtype=plain.dtype).copy_(plain)
        return body, tensors

    def _found_steps(self) -> list[int]:
        return sorted(int(name[1]) for path in self.folder.glob("*.json") if (name := _NAME.fullmatch(path.name)))

    def _path(self, step: int, suffix: str) -> Path:
        return self.folder / f"step-{step:09d}.{suffix}"

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            remove_file(self._path(step, "json"))  # first: tensors alone are an orphan, and are swept
            remove_file(self._path(step, "safetensors"))
        sync_folder(self.folder)


def _access(name: str, thing: Any) -> _Access:
    if isinstance(thing, torch.Generator):
        return thing.get_state, thing.set_state
    if isinstance(thing, np.random.Generator):
        return lambda: thing.bit_generator.state, lambda state: setattr(thing.bit_generator, "state", state)
    try:
        return thing.state_dict, thing.load_state_dict
    except AttributeError as error:
        raise AnchorageError(f"{name} cannot be saved: {error}") from None


def _read_bytes(file: Path) -> bytes:
    """A file's bytes; a disk that cannot give them has damaged them."""
    try:
        return file.read_bytes()
    except OSError as error:
        if error.errno != errno.EIO:  # no permission, say: a checkpoint may be whole, and must not be removed
            raise
        raise IntegrityError(file, expected="a file that can be read", found=error.strerror, remedy=_REMEDY) from None


def _expect(file: Path, expected: str, found: str) -> None:
    if expected != found:
        raise IntegrityError(file, expected=expected, found=found, remedy=_REMEDY)
