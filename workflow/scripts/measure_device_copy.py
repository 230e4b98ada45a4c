"""Copies of the model's weights to the GPU, where there is one -> device_copy.csv."""

from pathlib import Path

from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.loading.devicecopy import measure_device_copies
from anchorage.loading.subject import read_subjects

job = start_job(snakemake)
key, subjects = read_subjects(Path(snakemake.input.subjects))
table = measure_device_copies(
    key, subjects["weights"], repeats=job.settings.loading.repeats, seed=job.settings.seed, log=job.log
)
write_bytes(Path(snakemake.output[0]), table.to_csv(index=False).encode())
