"""This package's own writers as recipes: the real code saves, the real readers judge, and nothing is left out.

A version is one shard, part, checkpoint or line more. The readers are stricter than a resume is: what is under its
final name must be whole, and hold what was put there, even where a resume would merely make it again. Importing this
module imports no torch; a recipe does when it is used.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anchorage.digest import digest_bytes, digest_file, digest_value
from anchorage.durability.recipes import RECIPES, Recipe, by_case, last_of_run
from anchorage.durability.torchrecipes import TORCH
from anchorage.durable import append_line, read_lines, write_bytes
from anchorage.errors import IntegrityError
from anchorage.store import names
from anchorage.store.layout import Layout
from anchorage.store.manifest import FileRecord, ShardRecord, gather_parts, read_manifest, read_records, write_manifest

if TYPE_CHECKING:
    from anchorage.checkpoint import Checkpointer
    from anchorage.store.format import ShardBuffer, TierShape
    from anchorage.store.staging import Staging

_TIER, _SEQ_LEN, _SHARD_ROWS, _MAX_SHARDS = "residual", 16, 8, 64
# The last site, 6 KiB, is still in Python's buffer when a shard is flushed: a flush that came too late would be seen.
_WIDTHS = {"block.0": 232, "embed": 24}
_IDENTITY = {"what": "the durability lab's shards", "seq_len": _SEQ_LEN, "storage_dtype": "float16"}
_KEY = digest_value(_IDENTITY)
_REMEDY = "The writer that saved it is not safe."


def _layout(n_shards: int, n_parts: int) -> Layout:
    n_rows = n_shards * _SHARD_ROWS
    return Layout(n_rows, batch_rows=_SHARD_ROWS, shard_rows=_SHARD_ROWS, n_parts=n_parts, tier_rows={_TIER: n_rows})


def _tokens(rows: range) -> bytes:
    return b"".join(random.Random(row).randbytes(2 * _SEQ_LEN) for row in rows)


def _tokens_digest(rows: range) -> str:
    return digest_bytes(_tokens(rows))


def _shape() -> TierShape:
    from anchorage.store.format import TierShape

    return TierShape(_TIER, _WIDTHS, "none", _SEQ_LEN, "float16", "uint16")


def _site_bytes(shard: int, site: str) -> bytes:
    return random.Random(f"{shard} {site}").randbytes(_SHARD_ROWS * _SEQ_LEN * _WIDTHS[site] * 2)


def _fill(shard: int) -> ShardBuffer:
    import numpy as np
    import torch

    from anchorage.store.format import ShardBuffer

    buffer, rows = ShardBuffer(_shape(), _SHARD_ROWS), slice(0, _SHARD_ROWS)
    first = shard * _SHARD_ROWS
    tokens = np.frombuffer(_tokens(range(first, first + _SHARD_ROWS)), np.uint16)
    buffer.put_tokens(tokens.reshape(_SHARD_ROWS, _SEQ_LEN), 0)
    for site in _WIDTHS:
        place = buffer.rows_of(site, rows)
        place.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(_site_bytes(shard, site), np.uint8)
        buffer.seal(site, rows)
    return buffer


def _open_staging(folder: Path, layout: Layout, part: int) -> Staging:
    from anchorage.store.staging import Staging

    return Staging(folder / "staging", _KEY, layout=layout, part=part, log=lambda line: None)


def _commit(staging: Staging, shard: int) -> ShardRecord:
    """Make a shard durable: the calls of a capture's committer, in its order."""
    from anchorage.store.format import shard_metadata

    rows = staging.layout.tier_shard_rows(_TIER, shard)
    metadata = shard_metadata(_shape(), key=_KEY, shard=shard, rows=rows, tokens_digest=_tokens_digest(rows))
    files = staging.write_files(shard, {_TIER: _fill(shard)}, {_TIER: metadata})
    staging.log_batches({"shard": shard, "batches": []})
    staging.log_memory({"shard": shard})
    return staging.commit(shard, files, environment={"device": "none"})


def _commit_missing(staging: Staging) -> dict[int, ShardRecord]:
    """Accept what is whole, make the rest durable, as a capture does."""
    records = staging.accept(_tokens_digest)
    for shard in staging.shards:
        if shard not in records:
            records[shard] = _commit(staging, shard)
    return records


def save_shard(folder: Path, version: int) -> None:
    """Take over the shards that are whole, and make shard ``version`` durable if it is not among them."""
    staging = _open_staging(folder, _layout(_MAX_SHARDS, 1), 0)
    try:
        if version not in staging.accept(_tokens_digest):
            _commit(staging, version)
    finally:
        staging.close()


def load_shards(folder: Path) -> int | None:
    """The newest committed shard with all before it. Each shard file must be whole, whether committed or not."""
    staging = folder / "staging"
    for path in staging.glob("*.safetensors"):
        _check_shard(path, _index(path))
    found = {}
    for journal in staging.glob(names.journal("*")):
        for record in read_records(journal):
            _check_record(staging, record)
            found[record.shard] = record
    return last_of_run(found)


def _index(path: Path) -> int:
    index = names.staged_shard_index(path)
    if index is None:
        raise IntegrityError(path, expected="a shard's name", found=path.name, remedy=_REMEDY)
    return index


def _check_record(folder: Path, record: ShardRecord) -> None:
    listed = record.tiers[_TIER]
    path = folder / listed.file
    _check_shard(path, record.shard)
    found = FileRecord(listed.file, path.stat().st_size, digest_file(path), _SHARD_ROWS, _tokens_digest(_rows(record)))
    if found != listed:
        raise IntegrityError(path, expected=listed, found=found, remedy=_REMEDY)


def _rows(record: ShardRecord) -> range:
    return range(*record.rows)


def _check_shard(path: Path, shard: int) -> None:
    """Open a shard file as readers do, check every row, and compare it with what was put in."""
    from anchorage.store.format import TOKENS
    from anchorage.store.shardfile import ShardFile, check_rows

    rows = _layout(_MAX_SHARDS, 1).shard_rows_range(shard)
    file = ShardFile(path, {"key": _KEY, "tier": _TIER, "shard": shard, "tokens_digest": _tokens_digest(rows)})
    try:
        expected = {TOKENS: _tokens(rows)} | {site: _site_bytes(shard, site) for site in _WIDTHS}
        for name, data in expected.items():
            found, digests = file.read(name, 0, _SHARD_ROWS)
            check_rows(path, name, found, digests)
            if b"".join(map(bytes, found)) != data:
                raise IntegrityError(path, expected=f"{name} as put in", found="other bytes", remedy=_REMEDY)
    finally:
        file.file.close()


def save_publication(folder: Path, version: int) -> None:
    """Publish a part of ``version + 1`` shards: links in the cache, then the part's list."""
    staging = _open_staging(folder, _layout(version + 1, 1), 0)
    try:
        records = _commit_missing(staging)
        published = staging.publish(records, folder / "cache")
        write_manifest(folder / "cache" / names.published_part(0), _IDENTITY, published)
    finally:
        staging.close()


def load_publication(folder: Path) -> int | None:
    """The version that the part's list states; what it names, and what is staged, must be whole."""
    load_shards(folder)
    return _load_list(folder / "cache" / names.published_part(0), folder / "cache")


def _load_list(path: Path, cache: Path) -> int | None:
    if not path.exists():
        return None
    shards = read_manifest(path).shards
    for record in shards:
        _check_record(cache, record)
    return len(shards) - 1


def save_manifest(folder: Path, version: int) -> None:
    """Gather ``version + 1`` parts of a shard each into the manifest.

    The manifest stands beside the cache folder, not in it: a publication withdraws the one in it, as it must, and this
    recipe is about gathering alone.
    """
    layout, cache = _layout(_MAX_SHARDS, _MAX_SHARDS), folder / "cache"
    lists = [cache / names.published_part(part) for part in range(version + 1)]
    for part, path in enumerate(lists):
        if path.exists():
            continue
        staging = _open_staging(folder, layout, part)
        try:
            write_manifest(path, _IDENTITY, staging.publish(_commit_missing(staging), cache))
        finally:
            staging.close()
    gather_parts(lists, cache, folder / names.MANIFEST)


def load_manifest(folder: Path) -> int | None:
    """The version that the manifest states; what it names must be whole, and so must every part's list."""
    for path in (folder / "cache").glob(names.published_part("*")):
        _load_list(path, folder / "cache")
    return _load_list(folder / names.MANIFEST, folder / "cache")


class _State:
    """What is checkpointed: a tensor that tells the step, and the step."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {"weights": torch.frombuffer(bytearray(_weights(self.step)), dtype=torch.uint8), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        if state["weights"].numpy().tobytes() != _weights(self.step):
            raise IntegrityError("weights", expected=f"those of step {self.step}", found="others", remedy=_REMEDY)


def _weights(step: int) -> bytes:
    return random.Random(step).randbytes(64 * 1024 + 100)


def _checkpointer(folder: Path, state: _State) -> Checkpointer:
    from anchorage.checkpoint import Checkpointer

    return Checkpointer(folder / "saved", {"state": state}, every=1, log=lambda line: None)


def save_checkpoint(folder: Path, version: int) -> None:
    """Resume, and train to the step after ``version``; each step ends with a checkpoint."""
    state = _State()
    with _checkpointer(folder, state) as checkpoints:
        for step in checkpoints.steps(version + 1):
            state.step = step + 1


def load_checkpoint(folder: Path) -> int | None:
    """The newest committed checkpoint; it and the fall-back must be whole (an older one may be half pruned)."""
    from anchorage.statetree import decode_state

    state = _State()
    reader = _checkpointer(folder, state)
    steps = reader._found_steps()
    for step in steps[-reader.keep :]:  # not by entering it: that falls back to an older one, and sweeps
        body, tensors = reader._read(step)
        state.load_state_dict(decode_state(body["objects"]["state"], tensors))
        if state.step != step:
            raise IntegrityError(reader.folder, expected=f"step {step}", found=state.step, remedy=_REMEDY)
    return steps[-1] - 1 if steps else None


def _line(version: int) -> str:
    return f"{version} {random.Random(version).randbytes(1600).hex()}"


def save_line(folder: Path, version: int) -> None:
    """Append line ``version`` where the journal does not hold it yet."""
    last = load_lines(folder)
    if last is None or version > last:
        append_line(folder / "journal", _line(version))


def load_lines(folder: Path) -> int | None:
    """The last line that is whole, with all before it. One that is not is no line, as for our readers of such files:
    POSIX lets a power cut keep a line's end and lose its beginning."""
    found = set()
    for line in read_lines(folder / "journal"):
        with contextlib.suppress(ValueError):
            version = int(line.partition(" ")[0])
            found |= {version} if line == _line(version) else set()
    return last_of_run(found)


OURS: dict[str, Recipe] = by_case("write_bytes", write_bytes, ours=True) | {
    recipe.key: recipe
    for recipe in [
        Recipe("journal", "overwrite", save_line, load_lines, ours=True),
        Recipe("shard", "new name", save_shard, load_shards, ours=True),
        Recipe("publication", "overwrite", save_publication, load_publication, ours=True),
        Recipe("manifest", "overwrite", save_manifest, load_manifest, ours=True),
        Recipe("checkpoint", "new name", save_checkpoint, load_checkpoint, ours=True),
    ]
}
ALL_RECIPES: dict[str, Recipe] = RECIPES | TORCH | OURS
