"""The files that lie, and what refuses them.

Goal: the table says what happened: torch.load and our reader refuse, no payload runs, and the payloads are live.
Method: all files once, in fresh processes. Oracles: the payload's file on disk; safetensors' own reader on the shard
that the lies are made of. Controls: the same pickle without weights_only, the same shard without a lie, and tables that
must fail.
"""

from __future__ import annotations

import pickletools
import zipfile

import pandas as pd
import pytest
import torch
from safetensors import safe_open

from anchorage.errors import IntegrityError
from anchorage.loading.lies import FILE_LIES, HEADER_LIES, SITES, build_shard, split_shard, write_pickles
from anchorage.loading.refusals import COLUMNS, judge_refusals, read_file, refuse_files
from anchorage.store.shardfile import ShardFile, check_rows

KEY = "ab" * 16


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    rows = refuse_files(folder, key=KEY, log=lambda line: None)
    assert not list(folder.glob("*.ran"))  # each payload's file is removed before the next reader comes
    return rows


def test_every_file_is_tried_by_every_reader_it_concerns(table):
    found = pd.DataFrame(table, columns=COLUMNS)
    assert list(table[0]) == list(COLUMNS)
    assert set(found["key"]) == {KEY}
    lies = len(HEADER_LIES) + len(FILE_LIES)
    assert found["reader"].value_counts().to_dict() == {
        "ours": lies + 5,
        "safe_open": lies + 5,
        "torch.load": 4,
        "torch.load weights_only=True": 4,
        "torch.load weights_only=False": 4,
    }
    assert not found[["file", "reader"]].duplicated().any()
    assert all(message.isprintable() for message in found["message"])


def test_torch_refuses_each_pickle_and_no_payload_runs_but_in_the_control(table):
    for row in (row for row in table if row["kind"] == "pickle"):
        is_control = row["reader"] == "torch.load weights_only=False"
        assert row["side_effect"] == is_control, row
        assert row["refused"] != is_control, row
    said = {row["file"]: row["message"] for row in table if row["reader"] == "torch.load"}
    assert "exec" in said["exec.pt"]
    assert "system" in said["system.pt"]
    assert "exec" in said["hidden.pt"]


def test_ours_refuses_all_but_the_control_by_an_integrity_error_that_says_what_to_do(table):
    for row in (row for row in table if row["reader"] == "ours"):
        if row["file"] == "whole.safetensors":
            assert not row["refused"], row
        else:
            assert row["error_type"] == "IntegrityError", row
            assert row["message"].startswith(f"{row['file']}: expected "), row
    assert judge_refusals(table, key="key") == {"key": "key", "ok": True, "faults": []}


@pytest.mark.parametrize("name", {**HEADER_LIES, **FILE_LIES})
def test_each_lie_is_refused_here_too_and_differs_from_the_shard(tmp_path, name):
    build_shard(tmp_path / "whole", KEY)
    shard = (tmp_path / "whole").read_bytes()
    path = tmp_path / "lie"
    path.write_bytes({**HEADER_LIES, **FILE_LIES}[name][1](shard))
    assert path.read_bytes() != shard
    with pytest.raises(IntegrityError):
        read_rows(path)


def read_rows(path):
    shard = ShardFile(path, {"key": KEY})
    for site in SITES:
        check_rows(path, site, *shard.read(site, 0, 4))


def test_the_shard_that_lies_are_made_of_is_one(tmp_path):
    path = tmp_path / "whole"
    build_shard(path, KEY)
    read_rows(path)
    with safe_open(path, "pt") as file:
        values = {site: file.get_tensor(site) for site in SITES}
    assert torch.equal(values["embed"].flatten(), torch.arange(512, dtype=torch.float16))
    assert torch.equal(values["block.0"], values["embed"] + 1)
    header, data = split_shard(path.read_bytes())
    assert header["block.0"]["data_offsets"][1] == len(data)


def test_the_pickles_are_what_they_say(tmp_path):
    write_pickles(tmp_path)
    with zipfile.ZipFile(tmp_path / "hidden.pt") as archive:
        pickled = archive.read("hidden/data.pkl")
    assert any(code.name == "REDUCE" for code, _, _ in pickletools.genops(pickled))
    assert b"exec" in pickled
    for name in ("open.pt", "system.pt", "exec.pt"):
        assert not zipfile.is_zipfile(tmp_path / name)


def test_a_reading_that_is_accepted_says_so(tmp_path):
    build_shard(tmp_path / "whole", KEY)
    for reader in ("ours", "safe_open"):
        assert read_file(str(tmp_path / "whole"), reader, KEY) == {"refused": False, "error_type": "", "message": ""}
    assert read_file(str(tmp_path / "whole"), "ours", "0" * 32)["error_type"] == "IntegrityError"
    torch.save({"a": torch.ones(2)}, tmp_path / "good.pt")
    assert not read_file(str(tmp_path / "good.pt"), "torch.load", KEY)["refused"]


@pytest.mark.parametrize(
    ("reader", "change", "said"),
    [
        ("ours", {"refused": False}, "ours accepted it"),
        ("torch.load", {"refused": False}, "torch.load accepted it"),
        ("torch.load", {"side_effect": True}, "payload ran: True"),
        ("torch.load weights_only=False", {"side_effect": False}, "payload ran: False"),
    ],
)
def test_a_table_in_which_a_file_got_through_or_a_payload_is_dead_is_no_proof(table, reader, change, said):
    row = next(row for row in table if row["reader"] == reader and row["kind"] == "pickle")
    verdict = judge_refusals([row | change], key="key")
    assert not verdict["ok"]
    assert said in verdict["faults"][0]


def test_what_safe_open_does_is_only_looked_on_but_it_must_read_the_control(table):
    row = next(row for row in table if row["reader"] == "safe_open" and row["kind"] == "header")
    assert judge_refusals([row | {"refused": not row["refused"]}], key="key")["ok"]
    whole = next(row for row in table if row["reader"] == "safe_open" and row["file"] == "whole.safetensors")
    assert "refused it" in judge_refusals([whole | {"refused": True}], key="key")["faults"][0]
