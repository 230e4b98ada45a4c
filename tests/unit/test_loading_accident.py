"""The page cache measured by accident.

Goal: a second measurement and a plain copy are warm, and the lab's proof refuses to call them cold. Method: a small
file, really dropped and measured. Oracle: mincore on a mapping of the test's own, and the file's size. Control: dropped
again it is cold again; a drop that does nothing ends the job.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from anchorage.errors import MeasurementError
from anchorage.loading import accident
from anchorage.loading.accident import COLUMNS, PROVED, STEPS, show_accident
from anchorage.loading.fresh import FreshProcesses
from anchorage.loading.pagecache import ask_mincore, never_cold
from held import build_subject


def quiet(line):
    pass


@pytest.fixture
def subject(tmp_path):
    if reason := never_cold(tmp_path):
        pytest.skip(f"not run: the folder of temporary files is {reason}")
    return build_subject(tmp_path, 16)


def test_only_what_was_dropped_is_called_cold(subject, monkeypatch, tmp_path):
    seen = []
    call = FreshProcesses.call

    def look(self, function, **arguments):
        """What mincore says right before a measurement."""
        seen.append(ask_mincore(arguments["subject"]["files"][".safetensors"]).fraction)
        return call(self, function, **arguments)

    monkeypatch.setattr(FreshProcesses, "call", look)
    table = show_accident("k", subject, quiet)
    assert list(table.columns) == list(COLUMNS)
    table = table.set_index("step")
    assert list(table.index) == list(STEPS) == ["dropped", "again", "copied", "dropped-again"]
    assert list(table["resident_before"]) == seen == [0, 1, 1, 0]
    assert set(table["claimed"]) == {"cold"}
    n_bytes = Path(subject.files[".safetensors"]).stat().st_size
    assert list(table["file_bytes"]) == [n_bytes] * 4
    for step in ("dropped", "dropped-again"):
        assert table["bytes_from_disk"][step] == pytest.approx(n_bytes, rel=0.02)
        assert table["verdict"][step] == PROVED
    for step in ("again", "copied"):
        assert table["bytes_from_disk"][step] == 0
        assert table["verdict"][step].startswith("refused: ")
        assert "this was no cold measurement and is not reported" in table["verdict"][step]
        assert "found 100.0000%" in table["verdict"][step]
    assert table["of_cold_time"]["dropped"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair.pt", "pair.safetensors"]


def test_the_copy_is_removed_after_an_error(subject, monkeypatch, tmp_path):
    made = []

    def fail(self, function, **arguments):
        made.extend(path for path in tmp_path.iterdir() if path.name.startswith("pair.safetensors.tmp-"))
        if made:
            raise MeasurementError("planted")
        return {}

    monkeypatch.setattr(FreshProcesses, "call", fail)
    with pytest.raises(MeasurementError, match="planted"):
        show_accident("k", subject, quiet)
    assert made
    assert not made[0].exists()


def test_a_torn_copy_is_removed(subject, monkeypatch, tmp_path):
    def tear(source, target):
        Path(target).write_bytes(b"torn")
        raise OSError("no space")

    monkeypatch.setattr(shutil, "copy", tear)
    monkeypatch.setattr(FreshProcesses, "call", lambda self, function, **arguments: {})
    with pytest.raises(OSError, match="no space"):
        show_accident("k", subject, quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair.pt", "pair.safetensors"]


def test_without_dropping_nothing_is_called_cold(subject, monkeypatch):
    Path(subject.files[".safetensors"]).read_bytes()
    monkeypatch.setattr(accident, "make_cold", lambda path: None)
    with pytest.raises(MeasurementError, match="this was no cold measurement"):
        show_accident("k", subject, quiet)


def test_a_file_in_memory_is_not_run(subject, monkeypatch):
    monkeypatch.setattr(accident, "never_cold", lambda path: "tmpfs: never cold")
    table = show_accident("k", subject, quiet)
    assert list(table["status"]) == ["not run"] * 4
    assert set(table["reason"]) == {"tmpfs: never cold"}
    assert table["verdict"].isna().all()
