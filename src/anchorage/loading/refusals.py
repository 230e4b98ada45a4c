"""Files that lie, and a pickle that would run code: each is refused.

Every reading is done in a fresh process: a reader that a file crashes is then one more finding, and the payload of the
control runs where it can do no harm. The control of a pickle is the same file read with ``weights_only=False``: its
payload runs. The control of a lie is the shard that it was made from: it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anchorage.durable import remove_file
from anchorage.loading.fresh import FreshProcesses, KilledError
from anchorage.loading.lies import FILE_LIES, HEADER_LIES, build_shard, write_pickles

# key              capture key
# file             name of the file that was made for this; it is removed afterwards
# kind             pickle; header (a shard whose header lies); shard (a file that is no shard, or a damaged one)
# what             what is wrong with it; for a control, that nothing is
# reader           torch.load (its default), torch.load weights_only=True, torch.load weights_only=False (the control of
#                  a pickle), ours (the store's reader, every row of every site), safe_open (safetensors' own, every
#                  tensor)
# refused          whether the reader raised an error, or was ended by a signal
# error_type       class of that error, or the signal; empty where it was not refused
# message          what the error says, its beginning, in one line
# side_effect      whether the file that a pickle's payload makes was there afterwards; false for other files
# expected_refused what must be: true, false (a control), or empty where we only look on (safe_open)
COLUMNS = (
    "key",
    "file",
    "kind",
    "what",
    "reader",
    "refused",
    "error_type",
    "message",
    "side_effect",
    "expected_refused",
)
_CONTROL = "torch.load weights_only=False"
_TORCH: Mapping[str, Mapping[str, Any]] = {
    "torch.load": {},
    "torch.load weights_only=True": {"weights_only": True},
    _CONTROL: {"weights_only": False},
}
_IMPORTS = ("torch", "safetensors", "anchorage.store.shardfile", "anchorage.loading.refusals")
_MAX_MESSAGE = 300


def refuse_files(folder: Path, *, key: str, log: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Make files that lie, and let each be read.

    Args:
        folder: an empty folder of this caller's own; the files are left there.
        key: the capture key, which the shard that is changed carries.
        log: gets a line for each reading.

    Returns:
        The rows of ``refusals.csv`` (:data:`COLUMNS`); :func:`judge_refusals` judges them.
    """
    table = []
    with FreshProcesses(*_IMPORTS) as processes:
        for path, kind, what, readers, ran in _make_files(folder, key):
            for reader, expected in readers.items():
                found = _try_reader(processes, path, reader, key)
                ran_now = ran is not None and remove_file(ran)
                row = {"key": key, "file": path.name, "kind": kind, "what": what, "reader": reader, **found}
                table.append(row | {"side_effect": ran_now, "expected_refused": expected})
                said = f"refused: {found['error_type']}: {found['message']}" if found["refused"] else "read"
                log(f"{path.name} ({what}), {reader}: {said}{', its payload ran' if ran_now else ''}")
    return table


def judge_refusals(table: Sequence[dict[str, Any]], *, key: str) -> dict[str, Any]:
    """The verdict that a gate reads.

    Returns:
        ``key``, ``ok``, and ``faults``, a sentence each: a file was accepted or ran its payload, or a control was
        refused or did not run it.
    """
    faults = []
    for row in table:
        if row["expected_refused"] is None:
            continue
        is_pickle_control = row["reader"] == _CONTROL
        if row["refused"] != row["expected_refused"] or row["side_effect"] != is_pickle_control:
            did = "refused it" if row["refused"] else "accepted it"
            faults.append(f"{row['reader']} {did} ({row['file']}: {row['what']}), payload ran: {row['side_effect']}")
    return {"key": key, "ok": not faults, "faults": faults}


def _make_files(folder: Path, key: str) -> Iterator[tuple[Path, str, str, dict[str, bool | None], Path | None]]:
    """Write the files. Of each: path, kind, what is wrong, whether readers must refuse it, where a payload shows."""
    looked_on: dict[str, bool | None] = {"ours": True, "safe_open": None}
    for name, (what, ran) in write_pickles(folder).items():
        must: dict[str, bool | None] = {reader: reader != _CONTROL for reader in _TORCH}
        yield folder / name, "pickle", what, must | looked_on, ran
    whole = folder / "whole.safetensors"
    build_shard(whole, key)
    yield whole, "shard", "nothing: the control", {"ours": False, "safe_open": False}, None
    shard = whole.read_bytes()
    for kind, lies in (("header", HEADER_LIES), ("shard", FILE_LIES)):
        for name, (what, make) in lies.items():
            path = folder / f"{name}.safetensors"
            path.write_bytes(make(shard))
            yield path, kind, what, looked_on, None


def _try_reader(processes: FreshProcesses, path: Path, reader: str, key: str) -> dict[str, Any]:
    try:
        found = processes.call(read_file, path=str(path), reader=reader, key=key)
    except KilledError as error:
        found = {"refused": True, "error_type": "killed", "message": str(error)}
    return found | {"message": _one_line(found["message"].replace(f"{path.parent}/", ""))}


def read_file(path: str, reader: str, key: str) -> dict[str, Any]:
    """Read all of a file with one reader; called in a fresh process.

    Returns:
        ``refused``, ``error_type`` and ``message``.
    """
    try:
        if reader == "ours":
            _read_shard(Path(path), key)
        elif reader == "safe_open":
            _read_safetensors(path)
        else:
            import torch

            torch.load(path, **_TORCH[reader])
    # Whatever a reader raises is its answer; a panic of safetensors' is no Exception.
    except BaseException as error:
        return {"refused": True, "error_type": type(error).__name__, "message": str(error)}
    return {"refused": False, "error_type": "", "message": ""}


def _read_shard(path: Path, key: str) -> None:
    from anchorage.store.format import TOKENS
    from anchorage.store.shardfile import ShardFile, check_rows

    shard = ShardFile(path, {"key": key})
    n_rows = shard.metadata["rows"][1] - shard.metadata["rows"][0]
    for name in [*shard.metadata["sites"], TOKENS]:
        check_rows(path, name, *shard.read(name, 0, n_rows))


def _read_safetensors(path: str) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            file.get_tensor(name)


def _one_line(text: str) -> str:
    for advice in ("trusted source.", "WeightsUnpickler error:"):  # torch gives the reason after them
        text = text.rpartition(advice)[2]
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}..."
