"""How long will the run take, and does it fit on the disk? -> plan.json, from a short pilot."""

from pathlib import Path

from anchorage.durable import write_json
from anchorage.job import start_job
from anchorage.pilot import forecast_run
from anchorage.plan import load_plan

job = start_job(snakemake)
plan = load_plan(job.settings, Path(snakemake.input.model), Path(snakemake.input.tokens))
write_json(Path(snakemake.output[0]), forecast_run(plan, job.log))
