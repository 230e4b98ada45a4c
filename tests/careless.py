"""Recipes that do wrong when the system says no: controls of the table of faults."""

from __future__ import annotations

import contextlib
import os
import signal

from anchorage.durability.recipes import by_case


def _go_on(path, data):
    """Take no notice of a failed fsync."""
    temp = path.with_name(f"{path.name}.tmp")
    with open(temp, "wb") as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(OSError):
            os.fsync(file.fileno())
    os.replace(temp, path)


def _try_again(path, data):
    """Call fsync a second time."""
    temp = path.with_name(f"{path.name}.tmp")
    with open(temp, "wb") as file:
        file.write(data)
        file.flush()
        try:
            os.fsync(file.fileno())
        except OSError:
            os.fsync(file.fileno())
    os.replace(temp, path)


def _believe(path, data):
    """Take for saved what is there."""
    if not path.exists():
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _die(path, data):
    """Be killed when no block is free."""
    try:
        path.write_bytes(data)
    except OSError:
        os.kill(os.getpid(), signal.SIGKILL)


ALL_RECIPES = (
    by_case("go on", _go_on) | by_case("try again", _try_again) | by_case("believe", _believe) | by_case("die", _die)
)
