"""The parts' lists of shards -> the manifest; published files that it no longer names are removed."""

from pathlib import Path

from anchorage.job import start_job
from anchorage.store.manifest import gather_parts

job = start_job(snakemake)
manifest = Path(snakemake.output[0])
removed = gather_parts([Path(part) for part in snakemake.input], manifest.parent, manifest)
job.log(f"manifest of {len(snakemake.input)} part(s); removed {len(removed)} superseded file(s): {removed[:20]}")
