"""Fetch the default corpus, with its licence and origin beside it."""

from pathlib import Path

from anchorage.job import start_job
from anchorage.resources import fetch_corpus

job = start_job(snakemake)
fetch_corpus(Path(snakemake.output[0]), log=job.log)
