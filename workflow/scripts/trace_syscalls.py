"""The system calls of every recipe's saves -> syscalls.csv."""

from pathlib import Path

from anchorage.durability.ourrecipes import ALL_RECIPES
from anchorage.durability.tracing import trace_recipes
from anchorage.durable import write_bytes
from anchorage.job import start_job, work_folder

job = start_job(snakemake)
path = Path(snakemake.output[0])
with work_folder(path) as folder:
    table = trace_recipes([*ALL_RECIPES.values()], folder, log=job.log)
write_bytes(path, table.to_csv(index=False).encode())
