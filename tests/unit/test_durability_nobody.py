"""The lab without rights: a user who is nobody gets its tables, and "not run" where root is needed.

Goal: what needs no root works without it, and nothing is taken for passed. Method: a process gives up root for good and
runs the lab's parts, each of them small. Oracle: the controls are bad as ever, and the rows that need root say so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAB = """
import json, os, sys
from pathlib import Path
import anchorage.durability.profiles, torch  # while the environment can still be read
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
from anchorage.durability.faults import measure_faults
from anchorage.durability.flash import sweep_flash
from anchorage.durability.fsynccost import measure_costs
from anchorage.durability.kills import kill_saves
from anchorage.durability.legal import tabulate_legal_states
from anchorage.durability.powercut import Caps, cut_power
from anchorage.durability.recipes import RECIPES
place = Path(sys.argv[1])
two = [RECIPES["naive/overwrite"], RECIPES["full/overwrite"]]
tables = {}
for name, make in {
    "kills": lambda folder: kill_saves(two, folder, log=lambda line: None, every_call=4, n_bytes=3),
    "states": lambda folder: tabulate_legal_states(two, folder),
    "costs": lambda folder: measure_costs(folder, n_calls=20, big_mib=1, big_repeats=1, file_mib=1),
    "faults": lambda folder: measure_faults(["full/overwrite"], folder, max_places=1),
    "cuts": lambda folder: cut_power(two, ["ext4"], ["quiet"], folder=folder, caps=lambda _: Caps(5, 5), seed=0),
}.items():
    (place / name).mkdir()
    tables[name] = json.loads(make(place / name).to_json(orient="records"))
print(json.dumps([os.geteuid(), tables]))
"""


@pytest.fixture(scope="module")
def tables():
    """The lab's tables, made by nobody."""
    if sys.platform != "linux" or os.geteuid():
        pytest.skip("not run: only root can become nobody")
    # Not pytest's folder: it is closed to others.
    place = Path(tempfile.mkdtemp(prefix="nobody-"))
    try:
        shutil.chown(place, 65534, 65534)
        # The server of fresh processes is a new interpreter, started by nobody.
        tried = subprocess.run(
            [sys.executable, "-c", "import anchorage.durability.kills"], user=65534, group=65534, extra_groups=[],
            env=environment(), cwd=place, capture_output=True, text=True,
        )  # fmt: skip
        if tried.returncode:
            pytest.skip(f"not run: nobody may not read this environment: {tried.stderr.strip().splitlines()[-1]}")
        done = subprocess.run(
            [sys.executable, "-c", LAB, str(place)], env=environment(), cwd=place, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        user, found = json.loads(done.stdout.splitlines()[-1])
        assert user == 65534
        yield found
    finally:
        shutil.rmtree(place)


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "HOME": "/nonexistent", "HF_HUB_OFFLINE": "1"}


def test_kills_and_legal_states_need_no_rights(tables):
    for name, column in (("kills", "verdict"), ("states", "torn")):
        bad = {row["recipe"] for row in tables[name] if row[column] in ("torn", "gone") or row[column] and column == "torn"}
        assert bad == {"naive"}, name


def test_costs_are_measured(tables):
    rows = [row for row in tables["costs"] if (row["what"], row["mode"]) == ("write 4 KiB", "fsync")]
    assert [(row["status"], row["n"]) for row in rows] == [("measured", 20)]


def test_what_needs_root_is_not_run(tables):
    full = [row for row in tables["faults"] if (row["how"], row["error"]) == ("real", "ENOSPC")]
    assert [(row["status"], row["reason"]) for row in full] == [("not run", "mounting needs root and Linux")]
    closed = [row for row in tables["faults"] if (row["how"], row["error"]) == ("real", "EACCES")]
    assert [(row["status"], row["outcome"], row["retry_ok"]) for row in closed] == [("measured", "old", True)]
    assert [(row["status"], row["reason"]) for row in tables["cuts"]] == [("not run", "needs root")] * 2
