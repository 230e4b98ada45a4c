"""Does the run's first quarter predict the whole, and what would more rows take? -> extrapolation.json."""

import csv
from pathlib import Path

from anchorage.durable import write_json
from anchorage.extrapolation import extrapolate
from anchorage.job import start_job
from anchorage.plan import load_plan
from anchorage.store.manifest import read_manifest

job = start_job(snakemake)
plan = load_plan(job.settings, Path(snakemake.input.model), Path(snakemake.input.tokens))
table = list(csv.DictReader(Path(snakemake.input.memory).read_text().splitlines()))
report = extrapolate(plan, read_manifest(Path(snakemake.input.manifest)), table, job.log)
write_json(Path(snakemake.output[0]), report)
