"""The measurements of all subjects and methods -> loading.csv."""

from pathlib import Path

from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.loading.measuring import tabulate
from anchorage.loading.subject import read_subjects

job = start_job(snakemake)
key, subjects = read_subjects(Path(snakemake.input.subjects))
table = tabulate(
    [Path(path) for path in snakemake.input.tables],
    key=key,
    subjects=subjects,
    methods=job.settings.loading.methods,
    repeats=job.settings.loading.repeats,
)
write_bytes(Path(snakemake.output[0]), table.to_csv(index=False).encode())
