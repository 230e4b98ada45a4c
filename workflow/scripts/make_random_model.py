"""The default model with random weights, as a plain folder."""

from pathlib import Path

from anchorage.job import start_job
from anchorage.random_model import make_random_model

job = start_job(snakemake)
make_random_model(Path(snakemake.input[0]).parent, Path(snakemake.output[0]).parent, log=job.log)
