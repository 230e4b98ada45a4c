"""The shape of the code: imports point one way, functions and files stay small, one module alone does dangerous things.

Goal: the house of docs/design.md stands. Method: read the sources as syntax trees.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/anchorage"

# From the ground up. A module imports only what stands before it.
LAYERS = [
    ["errors", "processors", "driver", "diskio", "durable", "digest", "tensorfile"],
    [
        "settings",
        "wikitext",
        "resources",
        "random_model",
        "sources",
        "sites",
        "architecture",
        "trunk",
        "model_files",
        "model",
    ],
    ["textsource", "corpusfile", "packing", "corpus"],
    ["store.names", "store.layout", "store.format", "store.shardfile", "store.identity", "store.manifest"],
    ["store.staging", "store.prune", "store.reader", "store.verify"],
    [
        "plan",
        "memory",
        "leak",
        "reduction",
        "capturer",
        "capture",
        "forecast",
        "extrapolation",
        "pilot",
        "anchor",
        "prompts",
        "padding",
        "outliers",
        "statetree",
        "checkpoint",
    ],
    [
        "probe.labels",
        "probe.targets",
        "probe.tasks.duplicate_token",
        "probe.tasks.previous_token",
        "probe.tasks.position",
    ],
    ["probe.design", "probe.metrics", "probe.intervals", "probe.solver"],
    ["probe.tokenstream", "probe.fullbatch", "probe.adam", "probe.site", "probe.sweep"],
    ["costs.comparison", "costs.cases", "costs.process", "costs.rounds", "costs.sentences"],
    ["loading.fresh", "loading.subject", "loading.pagecache", "loading.raw", "loading.methods", "loading.subjects"],
    ["loading.forward", "loading.trial", "loading.measuring", "loading.workers", "loading.memorygroup"],
    ["loading.pressure", "loading.devicecopy", "loading.accident", "loading.lies", "loading.refusals"],
    ["loading.summary", "loading.claims", "loading.uses", "loading.puzzle", "loading.advice"],
    ["durability.recipes", "durability.torchrecipes", "durability.ourrecipes"],
    ["durability.saver", "durability.syscalls", "durability.order"],
    ["durability.ptrace", "durability.tracing", "durability.kills", "durability.mounts"],
    ["durability.disk", "durability.fsynccost", "durability.attempt", "durability.faults"],
    ["durability.operations", "durability.legal", "durability.flash"],
    ["durability.fuseserver", "durability.logdisk", "durability.replay", "durability.schedules"],
    ["durability.recording", "durability.powercut", "durability.profiles"],
    ["durability.command", "durability.workflowcut", "durability.smallrun"],
    ["durability.verdict", "durability.findings"],
    [
        "figures.style",
        "figures.anchor",
        "figures.sweep",
        "figures.outliers",
        "figures.memory",
        "figures.padding",
        "figures.costs",
        "figures.loading",
        "figures.flash",
        "figures.durability",
    ],
    ["gate", "rst", "overview", "job"],
]
ORDER = [name for layer in LAYERS for name in layer]
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = [path for path in SOURCES if path.name != "__init__.py"]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports_of(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "anchorage":
            inner = node.module.removeprefix("anchorage").lstrip(".")
            joined = [f"{inner}.{alias.name}".lstrip(".") for alias in node.names]
            names |= {name if name in ORDER else inner for name in joined}
        if isinstance(node, ast.Import):
            names |= {
                alias.name.removeprefix("anchorage.") for alias in node.names if alias.name.startswith("anchorage.")
            }
    return names - {""}


def points_down(name: str, source: str) -> bool:
    return all(ORDER.index(imported) < ORDER.index(name) for imported in imports_of(source))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_down(path):
    assert module_name(path) in ORDER, "it has no place in the layers"
    assert points_down(module_name(path), path.read_text()), imports_of(path.read_text())


def test_an_import_that_points_up_would_be_found():
    assert not points_down("digest", "from anchorage.store.reader import Cache")
    assert not points_down("store.names", "from anchorage.store import format")
    assert not points_down("errors", "import anchorage.durable")


@pytest.mark.parametrize("path", [*SOURCES, *sorted((ROOT / "workflow").rglob("*.py"))], ids=lambda path: path.stem)
def test_functions_and_files_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 70, node.name
    if path.parent.name == "scripts":
        assert text.count("\n") <= 25
        assert not any(isinstance(node, ast.For | ast.While) for node in ast.walk(ast.parse(text)))


def test_a_script_is_named_as_its_rule():
    rules = "".join(path.read_text() for path in (ROOT / "workflow/rules").glob("*.smk"))
    for script in (ROOT / "workflow/scripts").glob("*.py"):
        # rules that a loop names: one for each pattern of files, one for each group of sites
        assert f"rule {script.stem}:" in rules or script.stem in {"capture_part", "fit_probes"}
        assert f"../scripts/{script.name}" in rules


def test_only_durable_renames_and_syncs():
    for path in MODULES:
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
        dangerous = calls & {"os.rename", "os.replace", "os.fsync", "os.fdatasync", "os.link"}
        # the recipes of the durability lab are what durable.py must be better than; the costs are of the calls alone
        assert not dangerous or module_name(path) in {"durable", "durability.recipes", "durability.fsynccost"}


def test_environment_pins_equal_the_lock():
    def pins(lines):
        return sorted(line.strip() for line in lines if "==" in line and not line.startswith("#"))

    lock = pins((ROOT / "requirements.lock").read_text().splitlines())
    assert lock
    assert "+" not in "".join(lock)  # plain versions
    for path in (ROOT / "workflow/envs").glob("*.yaml"):
        environment = yaml.safe_load(path.read_text())
        assert pins(environment["dependencies"][-1]["pip"]) == lock
