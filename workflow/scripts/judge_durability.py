"""The lab's tables -> durability.json, the verdict."""

from pathlib import Path

from anchorage.durability.verdict import judge_tables, read_tables
from anchorage.durable import write_json
from anchorage.job import start_job

job = start_job(snakemake)
tables = read_tables({name: Path(path) for name, path in snakemake.input.items()})
write_json(Path(snakemake.output[0]), judge_tables(tables, key=snakemake.params.key))
