"""Every kill of every recipe's saves -> kill_points.csv."""

from pathlib import Path

from anchorage.durability.kills import kill_saves
from anchorage.durability.ourrecipes import ALL_RECIPES
from anchorage.durability.profiles import PROFILES
from anchorage.durable import write_bytes
from anchorage.job import start_job, work_folder
from anchorage.processors import available_processors

job = start_job(snakemake)
path, points = Path(snakemake.output[0]), PROFILES[snakemake.params.profile].kills
n_processes = min(snakemake.threads, available_processors())
with work_folder(path) as folder:
    table = kill_saves([*ALL_RECIPES.values()], folder, log=job.log, **points, n_processes=n_processes)
write_bytes(path, table.to_csv(index=False).encode())
