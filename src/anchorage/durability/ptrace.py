"""Kill a save at a chosen system call, or at a chosen byte of a file. Linux alone; needs no root.

A system call is stopped on entry by ptrace(2) and is never carried out. A byte is chosen by RLIMIT_FSIZE: the kernel
writes up to it, and the next write ends the process (setrlimit(2), SIGXFSZ). Nothing here imports what a save needs:
the caller has, and each save is a fork of it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from anchorage.driver import die_with_parent
from anchorage.errors import MeasurementError

_TRACEME, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
# System call stops carry bit 7; threads are followed; the traced end with their tracer.
_OPTIONS = 0x1 | 0x8 | 0x100000
_SYSCALL_STOP, _ENTRY, _WALL = signal.SIGTRAP | 0x80, 1, 0x40000000
_INFO = struct.Struct("<B3xIQQQ")  # op, architecture, instruction and stack pointer, number of the call
_NAMES = {
    0xC000003E: (  # x86_64
        "0 read,1 write,3 close,5 fstat,8 lseek,9 mmap,11 munmap,12 brk,13 rt_sigaction,16 ioctl,17 pread64,"
        "18 pwrite64,20 writev,39 getpid,40 sendfile,72 fcntl,73 flock,74 fsync,75 fdatasync,77 ftruncate,82 rename,"
        "83 mkdir,86 link,87 unlink,217 getdents64,231 exit_group,257 openat,262 newfstatat,318 getrandom,"
        "326 copy_file_range"
    ),
    0xC00000B7: (  # aarch64
        "25 fcntl,29 ioctl,32 flock,34 mkdirat,35 unlinkat,37 linkat,38 renameat,46 ftruncate,56 openat,57 close,"
        "61 getdents64,62 lseek,63 read,64 write,66 writev,67 pread64,68 pwrite64,71 sendfile,79 newfstatat,80 fstat,"
        "82 fsync,83 fdatasync,94 exit_group,134 rt_sigaction,172 getpid,214 brk,215 munmap,222 mmap,276 renameat2,"
        "278 getrandom,285 copy_file_range"
    ),
}


@dataclass(frozen=True)
class Killed:
    """How a save ended.

    Attributes:
        process: its number.
        acknowledged: it had returned before it was killed.
        call: the system call it was killed at; empty if it ended by itself, or was killed at a byte.
        was_killed: it was; else it ended by itself, before the point was reached.
    """

    process: int
    acknowledged: bool
    call: str
    was_killed: bool


def ptrace_refusal() -> str:
    """Why no process can be killed at a system call here; empty where it can."""
    if sys.platform != "linux":
        return "ptrace's system call stops are Linux's"
    try:
        killed = kill_at_call(lambda: None, 1)
    except MeasurementError as error:
        return str(error)
    return "" if killed.was_killed else "ptrace stops at no system call here"


def kill_at_call(save: Callable[[], object], nth: int) -> Killed:
    """Run a save in a forked process and kill it on entry of its ``nth`` system call, counted from 1.

    Raises:
        MeasurementError: the kernel refuses, or the save failed by itself.
    """
    process, answer = _fork(save, _trace_me)
    _, status = os.waitpid(process, 0)
    if not os.WIFSTOPPED(status):
        raise MeasurementError(f"ptrace is not allowed here: the traced process ended with status {status}")
    _ptrace(_SETOPTIONS, process, _OPTIONS)
    _ptrace(_SYSCALL, process, 0)
    call, status = _step(process, nth)
    return _ended(process, status, _read_answer(answer), call, signal.SIGKILL)


def _step(process: int, nth: int) -> tuple[str, int]:
    """Step all threads of a process from call to call. Returns the call it was killed at, and how it ended."""
    killed, seen = "", 0
    while True:
        stopped, status = os.waitpid(-1, _WALL)
        if not os.WIFSTOPPED(status):
            if stopped == process:
                return killed, status
            continue  # a thread has ended
        send = os.WSTOPSIG(status)
        if send == _SYSCALL_STOP and (call := _entered(stopped)):
            seen += 1
            if seen == nth:
                killed = call
                os.kill(process, signal.SIGKILL)
        # Stops of its own making: at a call, at a new thread, and of the new thread.
        own = send in (_SYSCALL_STOP, signal.SIGTRAP, signal.SIGSTOP)
        if not killed:
            _ptrace(_SYSCALL, stopped, 0 if own else send)


def kill_at_byte(save: Callable[[], object], n_bytes: int) -> Killed:
    """Run a save in a forked process that is killed when it writes past byte ``n_bytes`` of any file.

    Raises:
        MeasurementError: the save failed by itself.
    """
    process, answer = _fork(save, lambda: _limit(n_bytes))
    acknowledged = _read_answer(answer)
    _, status = os.waitpid(process, 0)
    return _ended(process, status, acknowledged, "", signal.SIGXFSZ)


def _fork(save: Callable[[], object], prepare: Callable[[], object]) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    if (process := os.fork()) == 0:
        os.close(read_end)
        _run(save, prepare, write_end)
    os.close(write_end)
    return process, read_end


def _run(save: Callable[[], object], prepare: Callable[[], object], answer: int) -> NoReturn:
    try:
        gc.disable()  # its calls would come at other places each time
        die_with_parent()
        prepare()
        save()
        os.write(answer, b".")
        os._exit(0)
    except BaseException:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))  # the limit would hold for this text too
        traceback.print_exc()
        os._exit(1)


def _trace_me() -> None:
    _ptrace(_TRACEME, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)


def _limit(n_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _read_answer(descriptor: int) -> bool:
    with os.fdopen(descriptor, "rb") as file:
        return file.read() == b"."


def _ended(process: int, status: int, acknowledged: bool, call: str, by: signal.Signals) -> Killed:
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == by
    if not was_killed and status != 0:
        raise MeasurementError(f"a save failed by itself, with status {status}; its traceback is above")
    return Killed(process, acknowledged, call, was_killed)


def _ptrace(request: int, process: int, data: int | ctypes.Array[ctypes.c_char], address: int = 0) -> None:
    if _function()(request, process, address, data) == -1:
        raise MeasurementError(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")


@functools.cache
def _function() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).ptrace
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    return function


@functools.cache
def _names(architecture: int) -> dict[str, str]:
    pairs = _NAMES.get(architecture, "").split(",")
    return {number: name for number, _, name in (pair.partition(" ") for pair in pairs)}


def _entered(process: int) -> str | None:
    """The name of the system call that a stopped process is about to make; None where it comes back from one."""
    buffer = ctypes.create_string_buffer(128)
    _ptrace(_GET_SYSCALL_INFO, process, buffer, len(buffer))
    kind, architecture, _, _, number = _INFO.unpack_from(buffer.raw)
    return _names(architecture).get(str(number), f"call {number}") if kind == _ENTRY else None
