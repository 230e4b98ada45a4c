"""Fixtures shared by the workflow and crash tests."""

from __future__ import annotations

import fcntl
import os

# Nothing here may reach a hub, and one thread a test process keeps two of them from slowing each other.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import pytest
from hypothesis import settings

from workflows import Workflow

# The same examples every time; --hypothesis-profile=long looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("long", max_examples=5_000, deadline=None)
settings.load_profile("same")


@pytest.fixture(scope="session")
def fresh_workflow(tmp_path_factory):
    """A workflow that has not run. Copy it, do not run it."""
    return Workflow(tmp_path_factory.mktemp("fresh"))


@pytest.fixture(scope="session")
def corpus_workflow(fresh_workflow, tmp_path_factory):
    """The same with its model resolved and its corpus built. Copy it, do not run it."""
    workflow = fresh_workflow.copy(tmp_path_factory.mktemp("corpus"))
    workflow.run("--", "corpus")
    return workflow


@pytest.fixture(scope="session")
def finished_workflow(fresh_workflow, tmp_path_factory):
    """The same run to its end. Copy it, do not run it. The first of the test processes runs it for all of them."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "finished"
    with open(root.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            building = fresh_workflow.copy(root.with_suffix(".building"))
            building.run()
            building.root.rename(root)
    return fresh_workflow.at(root)


@pytest.fixture(scope="session")
def uninterrupted(corpus_workflow, tmp_path_factory):
    """Shards and manifest of a run left alone, by number of parts."""
    known = {}

    def run(parts):
        if parts not in known:
            workflow = corpus_workflow.copy(tmp_path_factory.mktemp(f"whole-{parts}"))
            workflow.config["capture"]["parts"] = parts
            workflow.run("--", "cache")
            known[parts] = (workflow.shards(), workflow.manifest())
        return known[parts]

    return run
