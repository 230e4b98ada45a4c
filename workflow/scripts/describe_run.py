"""Findings and provenance -> overview.rst, the first page of the report."""

from pathlib import Path

from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.overview import describe_run

job = start_job(snakemake)
files = {name: Path(path) for name, path in snakemake.input.items()}
write_bytes(Path(snakemake.output[0]), describe_run(job.settings.run, files).encode())
