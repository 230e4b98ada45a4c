"""The model's weights, a synthetic file and a shard of the cache, in two formats -> files to load, subjects.json."""

import json
from pathlib import Path

from anchorage.job import start_job
from anchorage.loading.subjects import write_subjects

job = start_job(snakemake)
write_subjects(
    job.settings,
    json.loads(Path(snakemake.input.model).read_text()),
    Path(snakemake.input.manifest).parent,
    Path(snakemake.output.subjects).parent,
    job.log,
)
