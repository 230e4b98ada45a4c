"""The saver with a fault put into our writers: ``python broken_writers.py FAULT [RECIPE FOLDER VERSION]...``

What a check of durability must catch. Each fault is one that works in every test that has no crash in it.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys

from anchorage import durable


def drop_fsync():
    real = durable.sync_descriptor

    def sync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            real(descriptor)

    durable.sync_descriptor = sync


def drop_folder_fsync():
    durable.sync_folder = lambda folder: None


def fsync_before_flush():
    @contextlib.contextmanager
    def atomic_file(path):
        durable.make_folder(path.parent)
        temp = durable.temp_path(path)
        with open(temp, "w+b", 8192) as file:
            yield file
            durable.sync_descriptor(file.fileno())
            file.flush()
        os.replace(temp, path)
        durable.sync_folder(path.parent)

    durable.atomic_file = atomic_file


def journal_before_shard():
    from anchorage.store import names, staging

    write, commit, late = staging.Staging.write_files, staging.Staging.commit, []

    def write_files(self, shard, buffers, metadata):
        late.append((shard, buffers, metadata))
        tiers = {}
        for tier, buffer in buffers.items():
            n_rows = len(self.layout.tier_shard_rows(tier, shard))
            written = buffer.write(io.BytesIO(), n_rows, metadata[tier])
            name = names.staged_shard(tier, shard)
            tiers[tier] = staging.FileRecord(name, *written, n_rows, metadata[tier]["tokens_digest"])
        return tiers

    def commit_first(self, shard, tiers, *, environment):
        record = commit(self, shard, tiers, environment=environment)
        write(self, *late.pop())
        return record

    staging.Staging.write_files, staging.Staging.commit = write_files, commit_first


def publish_before_verify():
    from anchorage.store import staging

    staging.Staging._check = lambda self, record, tokens_digest: record


FAULTS = {
    fault.__name__: fault
    for fault in (drop_fsync, drop_folder_fsync, fsync_before_flush, journal_before_shard, publish_before_verify)
}

if __name__ == "__main__":
    from anchorage.durability import saver

    FAULTS[sys.argv[1]]()
    saver.main(sys.argv[2:])
