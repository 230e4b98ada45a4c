"""A process that is a drive: one file on FUSE, with a log of every write and flush. Standard library only.

It speaks the kernel's FUSE protocol itself (linux/fuse.h): a drive of one file needs nine of its requests, and a server
without a library can do the one thing that a library hides: read all waiting requests *before* it answers any. A flush
that waits beside a write was issued before that write had completed, so the flush does not cover it (the rule of
dm-log-writes, Documentation/admin-guide/device-mapper/log-writes.rst).

It is run as a program of its own, never as a thread: a thread that waits for the drive may hold Python's lock.
Arguments: descriptors of /dev/fuse, of the image, of the log, and of a pipe whose end says that the parent is gone.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import stat
import struct
import sys

# The log opens with shared counters: operations logged, bytes logged, writes still to be failed.
COUNTERS = struct.Struct("<QQQ")
HEADER_BYTES = 4096
# Each operation: kind, operations logged when it had completed, offset, bytes of data that follow.
RECORD = struct.Struct("<cQQQ")
WRITE, FLUSH, FAILED = b"w", b"f", b"e"

_IN, _OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_MAX_WRITE = 1 << 20
_LOOKUP, _FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _STATFS = 1, 2, 3, 4, 14, 15, 16, 17
_RELEASE, _FSYNC, _FLUSH, _INIT, _INTERRUPT, _DESTROY, _BATCH_FORGET = 18, 20, 25, 26, 36, 38, 42
_SILENT = {_FORGET, _INTERRUPT, _BATCH_FORGET}
_ASYNC_READ, _BIG_WRITES, _ASYNC_DIO, _MAX_PAGES = 1, 1 << 5, 1 << 15, 1 << 22
_DIRECT_IO = 1


class Drive:
    """The drive's image and its log.

    Args:
        image: descriptor of the image, of its full size.
        log: descriptor of an empty file.
    """

    def __init__(self, image: int, log: int) -> None:
        self.image, self.log, self.size = image, log, os.fstat(image).st_size
        os.ftruncate(log, HEADER_BYTES)
        self.shared = mmap.mmap(log, HEADER_BYTES)
        self.n_operations, self.end = 0, HEADER_BYTES

    def carry_out(self, requests: list[tuple[int, bytes]]) -> list[bytes | int]:
        """Do and log requests that were all issued before any of them is answered.

        Args:
            requests: opcode and body of each, in the order of arrival.

        Returns:
            For each the body of the answer, or an error number.
        """
        done = self.n_operations + sum(opcode in (_WRITE, _FSYNC) for opcode, _ in requests)
        return [self._carry_out(opcode, body, done) for opcode, body in requests]

    def _carry_out(self, opcode: int, body: bytes, done: int) -> bytes | int:
        if opcode == _WRITE:
            return self._write(body, done)
        if opcode == _FSYNC:
            self._append(FLUSH, done, 0, b"")
            return b""
        if opcode == _READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return os.pread(self.image, size, offset)
        if opcode in (_GETATTR, _SETATTR):
            return struct.pack("<QII", 3600, 0, 0) + self._attributes()
        if opcode == _OPEN:
            return struct.pack("<QIi", 0, _DIRECT_IO, 0)
        if opcode == _INIT:
            return _answer_init(body)
        if opcode == _STATFS:
            return struct.pack("<5Q4I24x", self.size // 4096, 0, 0, 1, 0, 4096, 255, 4096, 0)
        if opcode in (_RELEASE, _FLUSH, _DESTROY):
            return b""
        return errno.ENOSYS

    def _write(self, body: bytes, done: int) -> bytes | int:
        _, offset, size = struct.unpack_from("<QQI", body)
        n_failing = COUNTERS.unpack_from(self.shared)[2]
        if n_failing:
            COUNTERS.pack_into(self.shared, 0, self.n_operations, self.end, n_failing - 1)
            self._append(FAILED, done, offset, b"")
            return errno.EIO
        data = body[40 : 40 + size]
        os.pwrite(self.image, data, offset)
        self._append(WRITE, done, offset, data)
        return struct.pack("<II", size, 0)

    def _append(self, kind: bytes, done: int, offset: int, data: bytes) -> None:
        os.pwrite(self.log, RECORD.pack(kind, done, offset, len(data)) + data, self.end)
        self.end += RECORD.size + len(data)
        self.n_operations += 1
        failing = COUNTERS.unpack_from(self.shared)[2]
        COUNTERS.pack_into(self.shared, 0, self.n_operations, self.end, failing)

    def _attributes(self) -> bytes:
        mode = stat.S_IFREG | 0o600
        return struct.pack("<6Q10I", 1, self.size, self.size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _answer_init(body: bytes) -> bytes:
    _, minor, readahead, flags = struct.unpack_from("<4I", body)
    flags &= _ASYNC_READ | _BIG_WRITES | _ASYNC_DIO | _MAX_PAGES
    pages = _MAX_WRITE // 4096
    head = struct.pack("<4I2H2I2H", 7, min(minor, 31), readahead, flags, 64, 48, _MAX_WRITE, 1, pages, 0)
    return head.ljust(64, b"\0")


def _read_waiting(fuse: int) -> list[bytes]:
    requests = []
    while True:
        try:
            requests.append(os.read(fuse, _MAX_WRITE + (64 << 10)))
        except BlockingIOError:
            return requests
        except InterruptedError:
            continue
        except FileNotFoundError:  # the request was withdrawn
            continue


def serve(fuse: int, image: int, log: int, parent: int) -> None:
    """Answer requests until the file system is unmounted or the parent is gone."""
    drive = Drive(image, log)
    os.set_blocking(fuse, False)
    poll = select.poll()
    poll.register(fuse, select.POLLIN)
    poll.register(parent, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if parent in ready:
            return
        try:
            messages = _read_waiting(fuse)
        except OSError as error:
            if error.errno == errno.ENODEV:  # unmounted
                return
            raise
        heads = [_IN.unpack_from(message) for message in messages]
        kept = [(head, message) for head, message in zip(heads, messages, strict=True) if head[1] not in _SILENT]
        answers = drive.carry_out([(head[1], message[_IN.size :]) for head, message in kept])
        for (head, _), answer in zip(kept, answers, strict=True):
            code, payload = (-answer, b"") if isinstance(answer, int) else (0, answer)
            try:
                os.write(fuse, _OUT.pack(_OUT.size + len(payload), code, head[2]) + payload)
            except FileNotFoundError:  # it was interrupted meanwhile
                continue


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
