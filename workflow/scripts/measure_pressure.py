"""Mapped and copied tensors under a memory limit -> pressure.csv."""

from pathlib import Path

from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.loading.pressure import measure_pressure
from anchorage.loading.subject import read_subjects

job = start_job(snakemake)
key, subjects = read_subjects(Path(snakemake.input.subjects))
table = measure_pressure(key, subjects["big"], log=job.log)
write_bytes(Path(snakemake.output[0]), table.to_csv(index=False).encode())
