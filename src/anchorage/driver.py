"""Processes that end when the one they work for does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import psutil

_PR_SET_PDEATHSIG = 1
_DRIVER = "ANCHORAGE_DRIVER"


def name_driver() -> None:
    """Tell the jobs which process is their driver; called by the driver."""
    os.environ[_DRIVER] = str(os.getpid())


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_driver() -> None:
    """End this process when the driver ends, however it ends: a driver started anew must not meet old writers.

    The kernel does it where the driver is the parent. Where a shell stands between (conda, containers), or the driver
    ended while this process was still importing, a look at the driver's process does.
    """
    driver = int(os.environ.get(_DRIVER, os.getppid()))
    if os.getppid() == driver:
        die_with_parent()
    if not _is_alive(driver):
        os._exit(1)

    def watch() -> None:
        while _is_alive(driver):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _is_alive(pid: int) -> bool:
    try:
        # A killed process that nobody has waited for yet still has its number.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
