"""The capture's logs of memory -> memory.csv, memory_batches.csv."""

from pathlib import Path

from anchorage.job import start_job
from anchorage.memory import write_batch_table, write_memory_table
from anchorage.store.manifest import read_manifest
from anchorage.store.names import batch_log, memory_log

job = start_job(snakemake)
manifest = Path(snakemake.input[0])
staging = job.settings.staging / read_manifest(manifest).key
write_memory_table(Path(snakemake.output.shards), manifest, sorted(staging.glob(memory_log("*"))))
write_batch_table(Path(snakemake.output.batches), manifest, sorted(staging.glob(batch_log("*"))))
