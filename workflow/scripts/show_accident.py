"""What a benchmark that drops nothing measures -> accident.csv."""

from pathlib import Path

from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.loading.accident import show_accident
from anchorage.loading.subject import read_subjects

job = start_job(snakemake)
key, subjects = read_subjects(Path(snakemake.input.subjects))
table = show_accident(key, subjects["big"], log=job.log)
write_bytes(Path(snakemake.output[0]), table.to_csv(index=False).encode())
