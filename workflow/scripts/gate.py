"""Fail the workflow if a report says so."""

from pathlib import Path

from anchorage.gate import pass_gate
from anchorage.job import start_job

job = start_job(snakemake)
manifest = snakemake.params.manifest
pass_gate(Path(snakemake.input.report), Path(manifest) if manifest else None, Path(snakemake.output[0]), job.log)
