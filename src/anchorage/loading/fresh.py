"""A fresh process a measurement: peak memory, page faults and mapped pages of one must not be another's.

Importing torch takes seconds. So a server imports what a measurement needs, does nothing else, and forks a process for
each: ``python -m anchorage.loading.fresh MODULE ...``. A child has no file of the subject open or mapped, and the
kernel counts its peak (VmHWM), faults and bytes read from its birth on. What it is not: a process that has to find its
libraries on the disk first. Pages that the imports made are shared with the server until written to.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from anchorage.driver import die_with_parent
from anchorage.errors import AnchorageError, MeasurementError


class FreshProcesses:
    """A server that forks a process for each call. It ends with this process, however that ends.

    Linux ends it with the *thread* that made it; so make it in one that lives as long as its calls.

    Args:
        modules: what it imports before the first call.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._server = subprocess.Popen(
            [sys.executable, "-m", "anchorage.loading.fresh", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Run a module's function in a fresh process.

        Args:
            function: of a module, found there by its name.
            arguments: JSON values.

        Returns:
            What it returned, a JSON value.

        Raises:
            MeasurementError: it raised (its message or traceback is shown), or its process was killed.
        """
        request = {"module": function.__module__, "function": function.__name__, "arguments": arguments}
        assert self._server.stdin
        assert self._server.stdout
        with contextlib.suppress(BrokenPipeError):  # an ended server is told of below
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
        if not (line := self._server.stdout.readline()):
            raise MeasurementError(
                f"the server of fresh processes ended with {self._server.wait()}; what it said is above. It imports "
                f"{', '.join(self._modules)}: see that each can be imported"
            )
        answer = json.loads(line)
        if "value" in answer:
            return answer["value"]
        if "signal" in answer:
            how = f"was ended by {signal.Signals(answer['signal']).name}"
            raise KilledError(f"{function.__name__}({arguments}): its process {how}")
        raise MeasurementError(answer["error"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.kill()
        self._server.communicate()


class KilledError(MeasurementError):
    """A measurement's process was ended by a signal; by SIGKILL it often means that no memory was left."""


def serve(modules: list[str]) -> None:
    """Import modules, then answer a request a line until the input ends."""
    # What a library prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(read_end)
            die_with_parent()
            with os.fdopen(write_end, "w") as pipe:
                pipe.write(_call(request))
        finally:
            os._exit(0)  # what the interpreter does at its end is the server's to do
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    ended = f"{request['function']}: its process ended with {os.waitstatus_to_exitcode(status)} and gave no answer"
    return json.loads(text) if text else {"error": ended}


def _call(request: dict[str, Any]) -> str:
    """The answer as JSON; a function that tries to end the process, or returns what is no JSON, is an error too."""
    try:
        function = getattr(importlib.import_module(request["module"]), request["function"])
        return json.dumps({"value": function(**request["arguments"])})
    except AnchorageError as error:
        return json.dumps({"error": str(error)})
    except BaseException:
        return json.dumps({"error": traceback.format_exc()})


if __name__ == "__main__":
    # Its parent is the one that asks; without prctl the end of its input ends it.
    die_with_parent()
    serve(sys.argv[1:])
