"""The states that POSIX allows after a crash of every recipe -> legal_states.csv."""

from pathlib import Path

from anchorage.durability.legal import tabulate_legal_states
from anchorage.durability.ourrecipes import OURS
from anchorage.durability.recipes import RECIPES
from anchorage.durable import write_bytes
from anchorage.job import start_job, work_folder

job = start_job(snakemake)
path = Path(snakemake.output[0])
with work_folder(path) as folder:
    table = tabulate_legal_states((RECIPES | OURS).values(), folder)
write_bytes(path, table.to_csv(index=False).encode())
