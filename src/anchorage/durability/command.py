"""A command that ends with the lab that runs it, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from anchorage.driver import die_with_parent
from anchorage.errors import MeasurementError


def run_command(command: Sequence[str], folder: Path, *, stop: threading.Event | None = None) -> None:
    """Run a command to its end. The kernel kills it when the *thread* that called this ends.

    Args:
        command: a program and its arguments.
        folder: where it runs.
        stop: once it is set the command is killed.

    Raises:
        MeasurementError: it failed; the message has the end of what it said.
        KeyboardInterrupt: it was to stop.
    """
    # A program that asks the kernel and then becomes the command: between fork and exec no Python may run in threads.
    dying = [sys.executable, "-m", "anchorage.durability.command", *command]
    with subprocess.Popen(dying, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while True:
            try:
                said = process.communicate(timeout=0.2)[0]
                break
            except subprocess.TimeoutExpired:
                if stop is not None and stop.is_set():
                    process.kill()
                    raise KeyboardInterrupt from None
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        raise MeasurementError(f"{' '.join(command)} failed with {process.returncode}: {said[-3000:]}")


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
