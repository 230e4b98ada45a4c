"""Memory of processes that hold the model's weights at once -> workers.csv."""

from pathlib import Path

from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.loading.subject import read_subjects
from anchorage.loading.workers import measure_workers

job = start_job(snakemake)
key, subjects = read_subjects(Path(snakemake.input.subjects))
table = measure_workers(
    key, subjects["weights"], methods=job.settings.loading.methods, seed=job.settings.seed, log=job.log
)
write_bytes(Path(snakemake.output[0]), table.to_csv(index=False).encode())
