"""The durability lab through the workflow.

Goal: the target makes every file, and a bad writer fails the run but keeps verdict and text. Method: the slow tables
are planted, as a good run would leave them; the rest is run. The lab's own tests run what is planted here.
"""

from __future__ import annotations

import json

from durability_tables import build_tables, write_tables


def test_the_target_makes_all_and_its_gate_fails_on_a_bad_writer(fresh_workflow, tmp_path):
    workflow = fresh_workflow.copy(tmp_path)
    workflow.config["durability"] = {"profile": "small"}
    lab = tmp_path / "results/durability"
    tables = build_tables()
    del tables["flash"], tables["fsync_cost"]
    write_tables(tables, lab)
    (lab / "power_cuts").mkdir()
    for name in ("ext4", "ext4-noauto", "xfs", "btrfs"):
        tables["power_cuts"].to_csv(lab / f"power_cuts/{name}.csv", index=False)
    workflow.run("--", "durability")
    verdict = json.loads((lab / "durability.json").read_text())
    assert verdict["ok"]
    assert (lab / "gates/durability.ok").read_text() == f"{verdict['key']}\n"
    assert json.loads((lab / "fsync_cost.json").read_text())["filesystem"]
    assert (lab / "durability.md").read_text().startswith("# Can this lose what was saved?")
    assert {"flash.svg", "flash.png", "durability.svg", "durability.png"} <= {path.name for path in lab.iterdir()}
    assert not list(lab.rglob("*.work"))
    assert "Nothing to be done" in workflow.run("--", "durability")

    tables["syscalls"].loc[tables["syscalls"]["recipe"] == "shard", "faults"] = "no fsync before the rename"
    tables["syscalls"].to_csv(lab / "syscalls.csv", index=False)
    output = workflow.run("--keep-going", "--", "durability", ok=False)
    assert "no fsync before the rename" in output
    assert not json.loads((lab / "durability.json").read_text())["ok"]
    assert "no fsync before the rename" in (lab / "durability.md").read_text()
