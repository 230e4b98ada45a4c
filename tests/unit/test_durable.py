"""The durable recipe, call by call.

Goal: under its final name a file is whole at every moment, in the order write, fsync, replace, fsync folder, and an
error leaves the old version. Method: record the system calls; stop after each in turn; make each fail. Oracle: the
bytes on disk.
"""

from __future__ import annotations

import errno
import os
import stat

import pytest

from anchorage import durable


class Cut(BaseException):
    """Stands for the end of the process."""


CALLS = ("open", "fsync", "replace")


def trace_calls(monkeypatch, *, cut_after=None, fail=None):
    """Record os.open / fsync / replace; optionally end after the n-th, or let one fail. Returns the record."""
    seen = []
    real = {name: getattr(os, name) for name in CALLS}

    def wrap(name):
        def call(*args, **kwargs):
            kind = name
            if name == "fsync":
                kind = "fsync folder" if stat.S_ISDIR(os.fstat(args[0]).st_mode) else "fsync file"
            if fail == kind:
                raise OSError(errno.EIO, "planted")
            if cut_after is not None and len(seen) >= cut_after:
                raise Cut
            seen.append(kind)
            return real[name](*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, wrap(name))
    return seen


def test_the_order_of_calls(tmp_path, monkeypatch):
    (tmp_path / "neighbour").touch()
    seen = trace_calls(monkeypatch)
    durable.write_bytes(tmp_path / "a", b"new")
    assert [call for call in seen if call != "open"] == ["fsync file", "replace", "fsync folder"]


def test_cut_after_any_call_leaves_the_old_or_the_new_version(tmp_path, monkeypatch):
    path = tmp_path / "a"
    durable.write_bytes(path, b"old")
    versions = []
    for n_calls in range(6):
        with monkeypatch.context() as patch:
            trace_calls(patch, cut_after=n_calls)
            try:
                durable.write_bytes(path, b"new!")
                versions.append("done")
            except Cut:
                versions.append(path.read_bytes())
        durable.write_bytes(path, b"old")
    assert set(versions) == {b"old", b"new!", "done"}
    assert versions.index(b"new!") > versions.index(b"old")


@pytest.mark.parametrize("fail", ["fsync file", "replace"])
def test_an_error_is_raised_and_nothing_is_renamed(tmp_path, monkeypatch, fail):
    path = tmp_path / "a"
    durable.write_bytes(path, b"old")
    with monkeypatch.context() as patch:
        trace_calls(patch, fail=fail)
        with pytest.raises(OSError, match="planted"):
            durable.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
    durable.write_bytes(path, b"newer")  # a fresh file, not a second fsync of the failed one
    assert path.read_bytes() == b"newer"


def test_a_failed_folder_fsync_is_not_acknowledged(tmp_path, monkeypatch):
    trace_calls(monkeypatch, fail="fsync folder")
    with pytest.raises(OSError, match="planted"):
        durable.write_bytes(tmp_path / "a", b"new")


def test_new_folders_are_synced_into_their_parents(tmp_path, monkeypatch):
    (tmp_path / "neighbour").touch()
    seen = trace_calls(monkeypatch)
    durable.make_folder(tmp_path / "a/b/c")
    assert seen.count("fsync folder") == 3
    assert (tmp_path / "a/b/c").is_dir()


def test_a_folder_made_before_a_kill_and_not_forced_is_forced_by_whoever_comes_next(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        trace_calls(patch, fail="fsync folder")
        with pytest.raises(OSError, match="planted"):
            durable.make_folder(tmp_path / "made/a/b")
    (tmp_path / "made/a").mkdir(parents=True, exist_ok=True)
    synced = []
    monkeypatch.setattr(durable, "sync_folder", synced.append)
    durable.make_folder(tmp_path / "made/a")
    assert synced == [tmp_path / "made"]
    durable.make_folder(tmp_path / "made/a/b")
    assert synced == [tmp_path / "made", tmp_path / "made", tmp_path / "made/a"]
    (tmp_path / "made/a/b/file").touch()
    durable.make_folder(tmp_path / "made/a/b")  # one that holds something was forced before
    assert len(synced) == 3


@pytest.mark.parametrize("torn", [b"", b"thr", b"three but no newline"])
def test_appending_cuts_a_torn_line_first(tmp_path, torn):
    path = tmp_path / "journal"
    durable.append_line(path, "one")
    durable.append_line(path, "two")
    with open(path, "ab") as file:
        file.write(torn)
    assert durable.read_lines(path) == ["one", "two"]
    durable.append_line(path, "four")
    assert path.read_bytes() == b"one\ntwo\nfour\n"


def test_a_journal_torn_in_its_first_line(tmp_path):
    path = tmp_path / "journal"
    path.write_bytes(b"on")
    assert durable.read_lines(path) == []
    durable.append_line(path, "one")
    assert path.read_bytes() == b"one\n"
    assert durable.read_lines(tmp_path / "none") == []


def test_a_line_that_could_not_be_synced_is_cut_off_again(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    durable.append_line(path, "one")
    trace_calls(monkeypatch, fail="fsync file")
    with pytest.raises(OSError):
        durable.append_line(path, "two")
    assert path.read_text() == "one\n"
    monkeypatch.undo()
    durable.append_line(path, "two")
    assert durable.read_lines(path) == ["one", "two"]


def test_a_new_journal_has_a_durable_name_before_its_first_line(tmp_path, monkeypatch):
    path, seen = tmp_path / "journal", []
    path.touch()  # a kill came between its making and its first line
    monkeypatch.setattr(durable, "sync_folder", lambda folder: seen.append(path.read_text()))
    durable.append_line(path, "one")
    durable.append_line(path, "two")
    assert seen == [""]


def test_linking_shares_bytes_and_replaces(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"x")
    target.write_bytes(b"old")
    for _ in range(2):  # the second time the target already is that very file
        durable.link_file(source, target)
        assert os.path.samefile(source, target)
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM])
def test_where_links_are_impossible_a_copy_is_made(tmp_path, monkeypatch, code):
    def refuse(*args):
        raise OSError(code, "planted")

    monkeypatch.setattr(os, "link", refuse)
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"x" * 100)
    durable.link_file(source, target)
    assert target.read_bytes() == source.read_bytes()
    assert not os.path.samefile(source, target)


def test_another_link_error_is_raised(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "planted")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(OSError, match="planted"):
        durable.link_file(tmp_path / "a", tmp_path / "b")


def test_temp_names_are_known(tmp_path):
    assert durable.is_temp(durable.temp_path(tmp_path / "a.safetensors"))
    assert not durable.is_temp(tmp_path / "a.tmp")
    assert durable.temp_path(tmp_path / "a") != durable.temp_path(tmp_path / "a")


def test_json_refuses_nan(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        durable.write_json(tmp_path / "a.json", {"x": float("nan")})
    assert os.listdir(tmp_path) == []
