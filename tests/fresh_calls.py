"""What tests have a fresh process do; the server finds this module on its path."""

from __future__ import annotations

import os
import signal
import sys
import time

from anchorage.errors import IntegrityError, MeasurementError

calls = 0


def count_calls() -> list[int]:
    global calls
    calls += 1
    return [os.getpid(), os.getppid(), calls]


def hold_memory(mib: int) -> int:
    return len(b"x" * (mib << 20))


def speak(text: str) -> str:
    print(text, flush=True)
    return text


def refuse(message: str) -> None:
    raise MeasurementError(message)


def find_damage(message: str) -> None:
    raise IntegrityError("file", expected="this", found="that", remedy=message)


def fail(message: str) -> None:
    raise ValueError(message)


def leave(status: int) -> None:
    sys.exit(status)


def vanish(status: int) -> None:
    os._exit(status)


def answer_nonsense() -> set[int]:
    return {1}


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)
    signal.pause()


def sleep_long(file: str) -> None:
    with open(file, "w") as opened:
        opened.write(f"{os.getppid()} {os.getpid()}\n")
    time.sleep(600)
