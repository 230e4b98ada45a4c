"""One part of the capture: token rows -> shards, published when the part is whole."""

from pathlib import Path

from anchorage.capture import capture_part
from anchorage.job import start_job
from anchorage.plan import load_plan

job = start_job(snakemake)
plan = load_plan(job.settings, Path(snakemake.input.model), Path(snakemake.input.tokens))
capture_part(plan, int(snakemake.wildcards.p), part_path=Path(snakemake.output.part), log=job.log)
