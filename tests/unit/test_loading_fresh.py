"""A fresh process a measurement: nothing of one is another's, and however one ends the asking process is told.

Goal: no state, memory or output leaks between calls; an error, an exit, a kill and a lost server are each named;
nothing lives on. Method: small functions that count, print, fail, end and sleep. Oracle: process ids, VmHWM, psutil.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import fresh_calls
from anchorage.errors import MeasurementError
from anchorage.loading.fresh import FreshProcesses, KilledError
from anchorage.memory import measure_memory

TESTS = Path(fresh_calls.__file__).parent


@pytest.fixture(scope="module", autouse=True)
def find_calls():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
        yield


@pytest.fixture(scope="module")
def fresh(find_calls):
    with FreshProcesses("fresh_calls", "anchorage.memory") as server:
        yield server


def test_each_call_has_a_process_of_its_own(fresh):
    first, second = fresh.call(fresh_calls.count_calls), fresh.call(fresh_calls.count_calls)
    assert first[0] != second[0]  # the process
    assert first[1] == second[1] != os.getpid()  # the server
    assert first[2] == second[2] == 1  # what one counted the other does not see


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not run: VmHWM is Linux's")
def test_the_peak_of_one_is_not_anothers(fresh):
    before = fresh.call(measure_memory, device="cpu")["peak_mib"]
    assert fresh.call(fresh_calls.hold_memory, mib=256) == 256 << 20
    assert fresh.call(measure_memory, device="cpu")["peak_mib"] < before + 32


def test_what_is_printed_is_no_answer(fresh, capfd):
    assert fresh.call(fresh_calls.speak, text='{"value": 1}') == '{"value": 1}'
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (fresh_calls.refuse, {"message": "it was warm"}, "^it was warm$"),
        (fresh_calls.find_damage, {"message": "Mend it."}, "^file: expected this, found that. Mend it.$"),
        (fresh_calls.fail, {"message": "odd"}, "Traceback(.|\n)*in fail(.|\n)*ValueError: odd"),
        (fresh_calls.leave, {"status": 0}, "Traceback(.|\n)*SystemExit"),
        (fresh_calls.answer_nonsense, {}, "not JSON serializable"),
        (fresh_calls.vanish, {"status": 3}, "vanish: its process ended with 3 and gave no answer"),
        (fresh_calls.vanish, {"status": 0}, "vanish: its process ended with 0 and gave no answer"),
    ],
)
def test_what_goes_wrong_is_told_and_the_next_call_works(fresh, function, arguments, message):
    with pytest.raises(MeasurementError, match=message):
        fresh.call(function, **arguments)
    assert fresh.call(fresh_calls.count_calls)[2] == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_killed_process_is_named_with_its_signal(fresh, number):
    with pytest.raises(KilledError, match=f"end_by.*was ended by {number.name}"):
        fresh.call(fresh_calls.end_by, number=int(number))
    assert fresh.call(fresh_calls.count_calls)[2] == 1


def test_a_module_that_cannot_be_imported_is_named():
    with (
        FreshProcesses("no_such_module") as server,
        pytest.raises(MeasurementError, match=r"server of fresh processes ended with 1(.|\n)*no_such_module"),
    ):
        server.call(fresh_calls.count_calls)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not run: elsewhere a running call is not ended")
def test_killed_with_a_call_running_it_leaves_no_process(tmp_path):
    note = tmp_path / "pids"
    code = (
        "import fresh_calls; from anchorage.loading.fresh import FreshProcesses\n"
        f"FreshProcesses('fresh_calls').call(fresh_calls.sleep_long, file={str(note)!r})"
    )
    asking = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: note.exists() and note.read_text().endswith("\n"))
    left = [psutil.Process(int(pid)) for pid in note.read_text().split()]
    assert all(process.is_running() for process in left)
    asking.kill()
    asking.wait()
    wait_until(lambda: not any(process.is_running() for process in left))


def wait_until(done):
    for _ in range(600):
        if done():
            return
        time.sleep(0.05)
    raise AssertionError("it took more than 30 s")
