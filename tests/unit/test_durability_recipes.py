"""Ways of saving: what a reader finds, and what it refuses.

Goal: each recipe saves and loads versions; a torn, lost or foreign file is judged as such, in our own stores too.
Method: save, damage single files, judge. Oracle: which version was saved, and which file was damaged. Control: the
undamaged folder is judged new.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from anchorage.durability import recipes
from anchorage.durability.ourrecipes import ALL_RECIPES, OURS
from anchorage.durability.recipes import RECIPES, content, judge, last_of_run
from stores import flip_bit, tree, truncate


def save(recipe, folder, n_versions):
    for version in range(n_versions):
        recipe.write(folder, version)


@pytest.mark.parametrize("key", ALL_RECIPES)
def test_what_is_saved_is_found_and_loading_changes_nothing(tmp_path, key):
    recipe = ALL_RECIPES[key]
    assert judge(recipe, tmp_path, acknowledged=None, tried=0) == "old"
    for version in range(4):
        recipe.write(tmp_path, version)
        before = tree(tmp_path)
        assert recipe.load(tmp_path) == version
        assert judge(recipe, tmp_path, acknowledged=version, tried=version) == "new"
        assert judge(recipe, tmp_path, acknowledged=version, tried=version + 1) == "old"
        assert judge(recipe, tmp_path, acknowledged=version + 1, tried=version + 1) == "gone"
        assert tree(tmp_path) == before
    recipe.write(tmp_path, 3)  # again, over what is there
    assert judge(recipe, tmp_path, acknowledged=3, tried=3) == "new"


def is_judged(path):
    """Whether damage of a file is a fault that the reader finds: logs and locks are none of what is saved, journals may
    end torn, and DCP has no digest of its ``.metadata``."""
    return not (
        path.name.startswith(("memory-", "lock", ".metadata")) or path.name == "journal" or "journal-" in path.name
    )


def flip_in_the_middle(path):
    """There bytes are that were saved; at the head of PyTorch's files there is padding, which no digest covers."""
    flip_bit(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [truncate, lambda path: os.truncate(path, 0), flip_in_the_middle])
@pytest.mark.parametrize("key", ALL_RECIPES)
def test_every_damaged_file_under_a_final_name_is_torn(tmp_path, key, damage):
    recipe = ALL_RECIPES[key]
    save(recipe, tmp_path, 2)
    for path in filter(is_judged, [path for path in tmp_path.rglob("*") if path.is_file()]):
        whole = path.read_bytes()
        damage(path)
        assert judge(recipe, tmp_path, acknowledged=1, tried=1) == "torn", path
        path.write_bytes(whole)
    assert judge(recipe, tmp_path, acknowledged=1, tried=1) == "new"


@pytest.mark.parametrize("key", ["journal/overwrite", "shard/new name"])
def test_a_torn_last_line_loses_what_was_acknowledged_and_no_more(tmp_path, key):
    recipe = ALL_RECIPES[key]
    save(recipe, tmp_path, 3)
    (journal,) = [path for path in tmp_path.rglob("*") if path.name == "journal" or "journal-" in path.name]
    truncate(journal, 5)
    assert recipe.load(tmp_path) == 1
    assert judge(recipe, tmp_path, acknowledged=2, tried=2) == "gone"
    assert judge(recipe, tmp_path, acknowledged=1, tried=2) == "old"
    recipe.write(tmp_path, 2)
    assert recipe.load(tmp_path) == 2


@pytest.mark.parametrize("key", [key for key in ALL_RECIPES if "new name" in key and "checkpoint" not in key])
def test_a_version_lost_before_others_is_gone(tmp_path, key):
    recipe = ALL_RECIPES[key]
    save(recipe, tmp_path, 3)
    lost = next(path for path in sorted(tmp_path.rglob("*0001*")))
    if lost.is_dir():
        shutil.rmtree(lost)
    else:
        lost.unlink()
    assert judge(recipe, tmp_path, acknowledged=2, tried=2) in ("gone", "torn")


def test_a_version_under_anothers_name_is_torn(tmp_path):
    recipe = RECIPES["full/new name"]
    save(recipe, tmp_path, 2)
    (tmp_path / "state-000001").write_bytes(content(0))
    assert judge(recipe, tmp_path, acknowledged=0, tried=1) == "torn"


def test_versions_differ_and_are_larger_than_the_buffer():
    contents = [content(version) for version in range(6)]
    assert all(a != b and len(a) != len(b) for a, b in itertools.pairwise(contents))
    assert min(map(len, contents)) > 64 * 1024


def test_the_run_of_versions_ends_before_the_first_gap():
    assert [last_of_run(found) for found in ([], [0], [1], [0, 1, 3])] == [None, 0, None, 1]


@pytest.mark.parametrize("same", [False, True])
def test_a_temp_file_elsewhere_leaves_nothing_there(tmp_path, monkeypatch, same):
    if same:
        monkeypatch.setattr(recipes, "elsewhere", lambda folder: tmp_path.parent)
    (tmp_path / "folder").mkdir()
    recipe = RECIPES["temp elsewhere, move/overwrite"]
    save(recipe, tmp_path / "folder", 2)
    assert recipe.load(tmp_path / "folder") == 1
    assert not recipes.elsewhere_temp(tmp_path / "folder/state", os.getpid()).exists()


@pytest.mark.parametrize(("module", "name"), [(os, "fsync"), (recipes.shutil, "move"), (recipes.shutil, "copy2")])
def test_a_temp_file_elsewhere_is_gone_after_an_error(tmp_path, monkeypatch, module, name):
    def fail(*words, **named):
        raise OSError("planted")

    monkeypatch.setattr(module, name, fail)
    if name == "copy2":
        monkeypatch.setattr(recipes, "elsewhere", lambda folder: tmp_path.parent)
    with pytest.raises(OSError, match="planted"):
        RECIPES["temp elsewhere, move/overwrite"].write(tmp_path, 0)
    assert not recipes.elsewhere_temp(tmp_path / "state", os.getpid()).exists()


def test_a_killed_process_temp_files_elsewhere_are_swept_and_no_others(tmp_path):
    mine, other = (recipes.elsewhere_temp(tmp_path / "state", process) for process in (-17, -1))
    try:
        mine.touch()
        other.touch()
        recipes.sweep_elsewhere(tmp_path, -17)
        assert (mine.exists(), other.exists()) == (False, True)
    finally:
        other.unlink()
        mine.unlink(missing_ok=True)


def test_no_library_gives_a_recipe_a_default():
    code = (
        "import nnsight, dataclasses; from anchorage.durability.recipes import Recipe; "
        "print(hasattr(object(), 'save'), "
        "*[field.name for field in dataclasses.fields(Recipe) if field.default is not dataclasses.MISSING])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "ours", "modules"]  # nnsight does give every object a `save`
    package = Path(recipes.__file__).parent
    assert not [path for path in package.glob("*.py") if "recipe.save(" in path.read_text()]


def test_the_saver_says_what_it_does_before_and_after(tmp_path):
    words = ["full/new name", str(tmp_path), "0", "journal/overwrite", str(tmp_path), "0"]
    code = (
        "import sys; from anchorage.durability import saver; saver.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [
        f"{word} {key} 0" for key in (words[0], words[3]) for word in ("saving", "saved")
    ]
    assert RECIPES[words[0]].load(tmp_path) == OURS[words[3]].load(tmp_path) == 0


def test_a_save_that_fails_is_not_acknowledged(tmp_path):
    words = ["full/new name", str(tmp_path / "none"), "0"]
    module = [sys.executable, "-m", "anchorage.durability.saver"]
    ended = subprocess.run([*module, *words], capture_output=True, text=True, cwd=Path(tmp_path))
    assert ended.returncode != 0
    assert ended.stdout.splitlines() == ["saving full/new name 0"]
