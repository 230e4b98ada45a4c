"""Fetch the default model as a plain folder, with its licence and origin."""

from pathlib import Path

from anchorage.job import start_job
from anchorage.resources import fetch_model

job = start_job(snakemake)
fetch_model(Path(snakemake.output[0]).parent, log=job.log)
