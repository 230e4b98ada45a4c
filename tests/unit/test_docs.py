"""The documents say what the code does.

Goal: the worked example of docs/format.md, the tables of config/README.md and docs/results.md, and the commands of
README.md are true. Method: read them, and compare with the code.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from anchorage.memory import COLUMNS
from anchorage.settings import CaptureSettings, CorpusSettings, ModelSettings, Settings, TierSettings
from anchorage.store.format import TierShape
from anchorage.store.names import MANIFEST_FORMAT, SHARD_FORMAT
from anchorage.tensorfile import encode_header

ROOT = Path(__file__).parents[2]


def test_the_worked_example_of_the_format():
    text = (ROOT / "docs/format.md").read_text()
    written = re.search(r"```json\n(.*)\n```", text)[1]
    shape = TierShape("residual", {"embed": 6, "block.0": 6}, "none", 4, "float16", "uint16")
    metadata = json.loads(json.loads(written)["__metadata__"]["anchorage"])
    header, entries = encode_header(shape.specs(2), metadata)
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
    for section in (Settings, ModelSettings, CorpusSettings, CaptureSettings, TierSettings):
        for key in section.model_fields:
            assert f"`{key}`" in text or f"`{key}." in text or f"\n## {key}" in text or f", {key}\n" in text, key


def test_every_column_is_explained():
    text = (ROOT / "docs/results.md").read_text()
    for column in COLUMNS:
        assert f"`{column}`" in text, column


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
