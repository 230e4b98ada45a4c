"""One subject loaded by one method, as found, cold and warm -> loading/{subject}/{method}.csv."""

from pathlib import Path

from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.loading.measuring import measure_method
from anchorage.loading.subject import read_subjects

job = start_job(snakemake)
key, subjects = read_subjects(Path(snakemake.input.subjects))
table = measure_method(
    subjects[snakemake.wildcards.subject],
    snakemake.wildcards.method,
    key=key,
    repeats=job.settings.loading.repeats,
    seed=job.settings.seed,
    drop_caches=job.settings.loading.drop_caches,
    log=job.log,
)
write_bytes(Path(snakemake.output[0]), table.to_csv(index=False).encode())
