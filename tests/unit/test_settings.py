"""The configuration: every fault found, named by its path, all at once.

Goal: no misspelt or impossible value gets past the start of a run. Method: change the default configuration, read
what is said.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from anchorage.errors import SettingsError
from anchorage.settings import Settings, load_settings

CONFIG = Path(__file__).parents[2] / "config"
DEFAULT = yaml.safe_load((CONFIG / "config.yaml").read_text())


def change(**values):
    """The default configuration with values set by dotted path; `...` removes a key."""
    config = copy.deepcopy(DEFAULT)
    for path, value in values.items():
        *sections, key = path.split("__")
        place = config
        for section in sections:
            place = place[section]
        if value is ...:
            del place[key]
        else:
            place[key] = value
    return config


@pytest.mark.parametrize("path", sorted(CONFIG.glob("*.yaml")), ids=lambda path: path.name)
def test_the_configurations_in_the_repository_are_right(path):
    assert isinstance(load_settings(yaml.safe_load(path.read_text())), Settings)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"capture__shard_row": 3}, "capture.shard_row: unknown key; did you mean shard_rows"),
        ({"modle": {}}, "modle: unknown key; did you mean model"),
        ({"capture__tiers__sweep__site": []}, "capture.tiers.sweep.site: unknown key; did you mean sites"),
        ({"corpus__rows": "1024"}, "corpus.rows: input should be a valid integer (found '1024')"),
        ({"corpus__rows": 0}, "corpus.rows: input should be greater than or equal to 1 (found 0)"),
        ({"corpus__bos": "no"}, "corpus.bos: input should be a valid boolean"),
        ({"corpus__layout": "paded"}, "corpus.layout: input should be 'packed' or 'padded'"),
        ({"capture__shard_rows": 100}, "capture.shard_rows: must be a multiple of batch_rows (16); 96 would do"),
        ({"capture__storage_dtype": "fp16"}, "capture.storage_dtype: input should be 'float32'"),
        ({"capture__threads": 0}, "capture.threads: must be 'auto' or a count"),
        ({"capture__tiers": {}}, "capture.tiers: dictionary should have at least 1"),
        ({"capture__tiers__a/b": {"sites": ["embed"]}}, "tier name 'a/b'"),
        ({"capture__tiers__sweep__rows": "al"}, "capture.tiers.sweep.rows: input should be"),
        (
            {f"capture__tiers__{tier}__rows": 9 for tier in ("residual", "pooled", "sweep")},
            "capture: no tier keeps more than the first 9 of the 1024 rows; set corpus.rows to 9",
        ),
        ({"model__source": ...}, "model.source: is missing"),
        ({"model__device": "gpu"}, "model.device: string should match"),
        ({"run": "../up"}, "run: must be a folder name"),
        ({"anchor": 3}, "anchor: input should be a valid dictionary"),
    ],
)
def test_a_fault_is_named(values, said):
    with pytest.raises(SettingsError) as caught:
        load_settings(change(**values))
    assert said in str(caught.value)
    assert str(caught.value).startswith("1 fault(s)")


def test_several_faults_come_at_once():
    with pytest.raises(SettingsError) as caught:
        load_settings(change(modle={}, corpus__rows="x", capture__shard_rows=17, model__source=...))
    assert str(caught.value).startswith("4 fault(s)")
    for path in ("modle", "corpus.rows", "capture.shard_rows", "model.source"):
        assert f"\n  {path}: " in str(caught.value)


def test_tier_rows():
    settings = load_settings(change(corpus__rows=700))
    assert settings.tier_rows() == {"residual": 700, "pooled": 700, "sweep": 700}
    assert load_settings(DEFAULT).tier_rows()["sweep"] == 768


def test_staging_can_lie_elsewhere():
    assert load_settings(DEFAULT).staging == Path("results/smollm2-wikipedia/staging")
    assert load_settings(change(capture__staging_dir="/scratch/x")).staging == Path("/scratch/x/smollm2-wikipedia")
