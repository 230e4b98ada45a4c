"""What position alone, and token id alone, can tell on each task's tokens -> controls.json."""

from pathlib import Path

from anchorage.durable import write_json
from anchorage.job import start_job
from anchorage.probe.sweep import control_tasks
from anchorage.store.reader import open_cache

job = start_job(snakemake)
cache = open_cache(Path(snakemake.input.manifest).parent)
report = control_tasks(cache, job.settings.probe, seed=job.settings.seed, log=job.log)
write_json(Path(snakemake.output[0]), report)
