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
# The interpreter may lie where only root can read: of root's rights this one is kept.
_KEPT = "-all,+dac_read_search"
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", f"--inh-caps={_KEPT}"]
NOBODY += [f"--ambient-caps={_KEPT}", f"--bounding-set={_KEPT}"]
LAB = """
import json, os, sys
from pathlib import Path
from anchorage.durability.faults import measure_faults
import pandas as pd
from anchorage.durability.flash import FILLS, LOADS, SPARE_FACTORS, Geometry, measure_amplification
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
    "flash": lambda folder: pd.DataFrame([measure_amplification(
        [*LOADS][0], trim=True, fill=FILLS[0], geometry=Geometry.with_spare(SPARE_FACTORS[0], n_blocks=64), seed=0)]),
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
    if shutil.which("setpriv") is None:
        pytest.skip("not run: setpriv is not installed")
    # Not pytest's folder: it is closed to others.
    place = Path(tempfile.mkdtemp(prefix="nobody-"))
    try:
        shutil.chown(place, 65534, 65534)
        done = subprocess.run(
            [*NOBODY, sys.executable, "-c", LAB, str(place)],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "HOME": "/nonexistent", "HF_HUB_OFFLINE": "1"},
            cwd=place,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        user, found = json.loads(done.stdout.splitlines()[-1])
        assert user == 65534
        yield found
    finally:
        shutil.rmtree(place)


def test_kills_and_legal_states_need_no_rights(tables):
    assert {row["recipe"] for row in tables["kills"] if row["verdict"] == "torn"} == {"naive"}
    assert {row["recipe"] for row in tables["states"] if row["torn"]} == {"naive"}


def test_the_drive_is_modelled_and_costs_are_measured(tables):
    assert tables["flash"]
    rows = [row for row in tables["costs"] if (row["what"], row["mode"]) == ("write 4 KiB", "fsync")]
    assert [(row["status"], row["n"]) for row in rows] == [("measured", 20)]


def test_what_needs_root_is_not_run(tables):
    full = [row for row in tables["faults"] if (row["how"], row["error"]) == ("real", "ENOSPC")]
    assert [(row["status"], row["reason"]) for row in full] == [("not run", "mounting needs root and Linux")]
    closed = [row for row in tables["faults"] if (row["how"], row["error"]) == ("real", "EACCES")]
    assert [(row["status"], row["outcome"], row["retry_ok"]) for row in closed] == [("measured", "old", True)]
    assert [(row["status"], row["reason"]) for row in tables["cuts"]] == [("not run", "needs root")] * 2
