"""The glue between jobs and driver.

Goal: a job never outlives its driver; claims of threads fill a machine once; folders are judged before anything is
made. Method: real processes; machines and folders played.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from anchorage import job
from anchorage.driver import _is_alive
from anchorage.errors import AnchorageError
from anchorage.settings import load_settings
from plans import CONFIG

JOB = "from anchorage.driver import die_with_driver as d; import time; d(); print('lives', flush=True); time.sleep(60)"


def start_job(driver: int, *, through_shell: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", JOB]
    if through_shell:  # as with conda: a shell stands between driver and job
        command = ["bash", "-c", '"$@"; true', "bash", *command]
    environment = os.environ | {"ANCHORAGE_DRIVER": str(driver)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("through_shell", [False, True])
def test_a_job_ends_when_its_driver_is_gone_or_a_zombie(through_shell):
    driver = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    running = start_job(driver.pid, through_shell=through_shell)
    assert running.stdout.readline() == "lives\n"  # control
    driver.kill()
    while _is_alive(driver.pid):
        time.sleep(0.01)
    late = start_job(driver.pid, through_shell=through_shell)  # the driver ended while this one was importing
    assert late.communicate(timeout=20)[0] == ""
    running.communicate(timeout=20)
    driver.wait()
    assert not _is_alive(driver.pid)


@pytest.mark.parametrize(
    ("threads", "cores", "processors", "claimed"),
    [("auto", 4, 2, 4), (1, 4, 2, 2), (2, 4, 2, 4), (1, 4, 4, 1), (8, 4, 2, 4), (1, 1, 64, 1), (2, 8, 64, 2)],
)
def test_threads_claimed_fill_the_machine_once(monkeypatch, threads, cores, processors, claimed):
    monkeypatch.setattr(job, "available_processors", lambda: processors)
    assert job.rule_threads(threads, cores) == claimed


def test_folders_are_judged_and_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(CONFIG)
    job.check_folders(settings)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "results").write_text("")
    with pytest.raises(AnchorageError, match="results is a file"):
        job.check_folders(settings)
    (tmp_path / "results").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(AnchorageError, match="is not writable"):
        job.check_folders(settings)


def test_a_new_driver_sweeps_what_a_killed_one_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(CONFIG)
    left = settings.results / "corpus/tokens.safetensors.tmp-12-0011aabb"
    staged = settings.staging / "key/few.shard-000000.safetensors.tmp-12-0011aabb"
    for path in (left, staged):
        path.parent.mkdir(parents=True)
        path.write_text("")
    os.close(job.hold_run(settings))
    assert [left.exists(), staged.exists()] == [False, True]
