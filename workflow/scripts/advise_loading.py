"""The loading lab's tables -> loading.md: which method for which use, and which claims hold here."""

from dataclasses import fields
from pathlib import Path

from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.loading.advice import advise
from anchorage.loading.claims import Tables, read_tables
from anchorage.loading.subject import read_subjects

job = start_job(snakemake)
files = {field.name: Path(snakemake.input[field.name]) for field in fields(Tables)}
key, _ = read_subjects(Path(snakemake.input.subjects))
write_bytes(Path(snakemake.output[0]), advise(read_tables(files, key)).encode())
