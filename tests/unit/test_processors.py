"""Processors are those the process is bound to, or fewer where a container's quota is smaller.

Method: machines are played by replacing what is asked about bindings, and by quota files written by hand.
"""

from __future__ import annotations

import os

from anchorage import processors


def test_processors_are_limited_by_binding_and_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for quota, expected in [(float("inf"), 8), (2.5, 2), (0.5, 1), (64.0, 8)]:
        monkeypatch.setattr(processors, "_cgroup_quota", lambda root, quota=quota: quota)
        assert processors.available_processors() == expected
    monkeypatch.undo()
    assert processors._cgroup_quota(tmp_path) == float("inf")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert processors._cgroup_quota(tmp_path) == float("inf")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("300000\n")
    assert processors._cgroup_quota(tmp_path) == 3
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert processors._cgroup_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert processors._cgroup_quota(tmp_path) == 3
