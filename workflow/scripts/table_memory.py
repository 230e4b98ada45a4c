"""The capture's memory logs -> memory.csv."""

from pathlib import Path

from anchorage.job import start_job
from anchorage.memory import write_memory_table
from anchorage.store.manifest import read_manifest
from anchorage.store.names import memory_log

job = start_job(snakemake)
manifest = Path(snakemake.input[0])
logs = sorted((job.settings.staging / read_manifest(manifest).key).glob(memory_log("*")))
write_memory_table(Path(snakemake.output[0]), manifest, logs)
