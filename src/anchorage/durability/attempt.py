"""One save in a process of its own, with a tracer attached that may let one of its system calls fail."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from anchorage.durability.mounts import leave_mounts, mount
from anchorage.durability.recipes import Recipe, judge, sweep_elsewhere
from anchorage.durability.syscalls import TRACED
from anchorage.errors import MeasurementError

TABLE = "anchorage.durability.ourrecipes"  # a module with ALL_RECIPES
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
_NOBODY = 65534


def attempt_save(
    table: str, key: str, folder: str, version: int, log: str = "", inject: str = "", powerless: bool = False
) -> dict[str, Any]:
    """Save once, in a process made for it.

    Args:
        table: module with ``ALL_RECIPES``.
        key: of the recipe.
        folder: where.
        version: which.
        log: where strace writes; empty: none is attached.
        inject: strace's ``--inject`` expression; calls are counted from the moment that strace is attached.
        powerless: as a user without the right to write everywhere; it is given up where the process has it.

    Returns:
        ``acknowledged``: the save returned; ``raised``: the error, or empty; ``refused``: why strace could not be
        attached (then nothing was saved), or empty.
    """
    recipe = find_recipe(table, key)
    place = Path(folder)
    if powerless and os.geteuid() == 0:
        os.chdir(folder)  # the folders above may be closed to others
        place = Path()
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    tracer = _attach(log, inject) if log else None
    if tracer is not None and (refused := _await_attached(tracer)):
        return {"acknowledged": False, "raised": "", "refused": refused}
    raised = _save(recipe, place, version)
    if tracer is not None:
        tracer.terminate()  # it detaches; the process goes on
        tracer.wait()
    return {"acknowledged": not raised, "raised": raised, "refused": ""}


def attempt_on_full(table: str, key: str, folder: str) -> dict[str, Any]:
    """Save version 1 where version 0 has left no block free, then again where there is room.

    The filesystem lies in memory, and is mounted in this process's own mount namespace: it goes when the process does,
    however it ends.

    Args:
        table, key: see :func:`attempt_save`.
        folder: an empty one to mount on.

    Returns:
        As :func:`attempt_save`, and ``outcome``: the reader's verdict then; ``retry_ok``: the second try returned, and
        its version is found; ``refused``: why no filesystem can be mounted, or empty.

    Raises:
        MeasurementError: version 0 could not be saved.
    """
    recipe, place = find_recipe(table, key), Path(folder)
    try:
        leave_mounts()
        mount("anchorage", place, "tmpfs", options="size=1m")
    except OSError as error:
        return {"refused": f"no filesystem can be mounted: {error}"}
    if raised := _save(recipe, place, 0):
        raise MeasurementError(f"{key} cannot save into 1 MiB: {raised}")
    free, filler = os.statvfs(place), place / "filler"
    filler.write_bytes(bytes(free.f_bavail * free.f_bsize))
    raised = _save(recipe, place, 1)
    outcome = judge(recipe, place, acknowledged=0 if raised else 1, tried=1)
    filler.unlink()
    retried = not _save(recipe, place, 1) and judge(recipe, place, acknowledged=1, tried=1) == "new"
    return {"acknowledged": not raised, "raised": raised, "refused": "", "outcome": outcome, "retry_ok": retried}


def _save(recipe: Recipe, folder: Path, version: int) -> str:
    """The error that a save raises; empty: none."""
    try:
        recipe.write(folder, version)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sweep_elsewhere(folder, os.getpid())
    return ""


def judge_folder(table: str, key: str, folder: str, acknowledged: int, tried: int) -> str:
    """What the recipe's reader finds: a verdict."""
    return judge(find_recipe(table, key), Path(folder), acknowledged=acknowledged, tried=tried)


def find_recipe(table: str, key: str) -> Recipe:
    """A recipe by the module that has it and its key."""
    return importlib.import_module(table).ALL_RECIPES[key]


def _attach(log: str, inject: str) -> subprocess.Popen[str]:
    if sys.platform == "linux":  # a child may trace its parent, even where only parents may trace (Yama)
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    calls = ",".join(f"?{name}" for name in sorted(TRACED))
    command = ["strace", "-f", "-y", "-s", "0", "-e", f"trace={calls}", "-o", log, "-p", str(os.getpid())]
    injection = ["-e", f"inject={inject}"] if inject else []
    # It waits until this process has done with starting it: which calls are counted must not depend on who is faster.
    waiting = ["sh", "-c", 'read -r go && exec "$@"', "sh", *command, *injection]
    tracer = subprocess.Popen(waiting, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert tracer.stdin
    os.write(tracer.stdin.fileno(), b"go\n")
    return tracer


def _await_attached(tracer: subprocess.Popen[str]) -> str:
    assert tracer.stderr
    said = tracer.stderr.readline().strip()
    if "attached" in said:
        return ""
    tracer.kill()
    tracer.wait()
    return said or "strace ended at once"
