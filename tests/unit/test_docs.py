"""The documents say what the code does.

Goal: the worked example of docs/format.md, the tables of config/README.md and docs/results.md, and the commands of
README.md are true. Method: read them, and compare with the code.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import torch

from anchorage import memory, outliers, padding
from anchorage.costs import comparison
from anchorage.durability import faults, flash, fsynccost, kills, legal, powercut, tracing, workflowcut
from anchorage.loading import accident, devicecopy, measuring, pressure, refusals, workers
from anchorage.loading.methods import METHODS
from anchorage.probe import fullbatch, sweep
from anchorage.probe.labels import Labels, known_tasks
from anchorage.settings import (
    CaptureSettings,
    CorpusSettings,
    DurabilitySettings,
    LoadingSettings,
    ModelSettings,
    ProbeSettings,
    Settings,
    TierSettings,
)
from anchorage.store.format import TierShape
from anchorage.store.names import MANIFEST_FORMAT, SHARD_FORMAT
from anchorage.tensorfile import encode_header

ROOT = Path(__file__).parents[2]


def test_the_worked_example_of_the_format():
    text = (ROOT / "docs/format.md").read_text()
    written = re.search(r"```json\n(.*)\n```", text)[1]
    shape = TierShape("residual", {"embed": 6, "block.0": 6}, "none", 4, "float16", "uint16")
    metadata = json.loads(json.loads(written)["__metadata__"]["anchorage"])
    header, entries = encode_header(shape.specs(2, 8), metadata)
    assert header[8:].decode().rstrip(" ") == written
    row = entries["block.0"].start + entries["block.0"].row_bytes
    digest = entries["row_digests"].start + (1 * 2 + 1) * 8
    numbers = (len(header) - 8, len(header), row, digest, entries["block.0"].stop)
    for number in numbers:
        assert str(number) in text, numbers
    assert SHARD_FORMAT in text
    assert MANIFEST_FORMAT in text


def test_every_key_is_explained():
    text = (ROOT / "config/README.md").read_text()
    sections = (ModelSettings, CorpusSettings, CaptureSettings, TierSettings, ProbeSettings, LoadingSettings)
    sections += (DurabilitySettings,)
    for section in (Settings, *sections):
        for key in section.model_fields:
            assert (
                f"`{key}`" in text
                or f"`{key}." in text
                or f".{key}`" in text
                or f"\n## {key}" in text
                or f", {key}\n" in text
            ), key


def test_every_column_is_explained():
    text = (ROOT / "docs/results.md").read_text()
    tables = [memory.COLUMNS, memory.BATCH_COLUMNS, sweep.COLUMNS, outliers.COLUMNS, outliers.DIMENSION_COLUMNS]
    tables += [padding.COLUMNS, padding.NORM_COLUMNS, comparison.COLUMNS]
    tables += [module.COLUMNS for module in (measuring, workers, pressure, devicecopy, accident, refusals)]
    durability = (powercut, workflowcut, kills, faults, legal, tracing, fsynccost, flash)
    tables += [module.COLUMNS for module in durability]
    for column in itertools.chain(*tables):
        assert f"`{column}`" in text, column


def test_every_method_of_loading_is_explained():
    text = (ROOT / "config/README.md").read_text()
    for method in METHODS:
        assert f"`{method}`" in text, method


def test_the_probes_are_described_as_they_are():
    text = (ROOT / "docs/probes.md").read_text()
    for task in known_tasks():
        assert f"| `{task}` |" in text
    assert ", ".join(f"{penalty:f}".rstrip("0") for penalty in fullbatch.PENALTIES) in text
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    tokens = np.array([[330, 1, 378], [2, 339, 3]])
    labels = names["label"](tokens, np.array([True, False]))
    assert isinstance(labels, Labels)
    assert labels.values.tolist() == [[1, 0, 1], [0, 1, 0]]
    assert labels.cells.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_the_checkpointed_loop_of_the_documents_runs_and_has_nothing_left_to_do(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/checkpoint.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    ends = []
    for _ in range(2):
        names: dict = {}
        exec(code, names)
        ends.append([value.clone() for value in names["model"].state_dict().values()])
    assert names["checkpoints"].resumed == 1000
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


def test_the_schema_for_editors_is_that_of_the_settings():
    written = json.loads((ROOT / "workflow/schemas/config.schema.json").read_text())
    assert written == Settings.model_json_schema(), "write it anew: make format"


def test_the_commands_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    commands = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    targets = {command.split()[1] for command in commands if command.startswith("make ")}
    targets |= set(re.findall(r"`make (\w+)`", text))
    assert {"run", "test", "help"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for name in re.findall(r"\]\(([\w/.]+)\)", text) + re.findall(r"`(config/[\w.-]+)`", text):
        assert (ROOT / name).exists() or name == "config/mine.yaml", name
