"""Fail the workflow if a report says so."""

from pathlib import Path

from anchorage.gate import pass_gate
from anchorage.job import start_job

job = start_job(snakemake)
pass_gate(Path(snakemake.input.report), Path(snakemake.params.manifest), Path(snakemake.output[0]), job.log)
