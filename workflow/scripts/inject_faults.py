"""An error in each call of every recipe's save -> faults.csv."""

from pathlib import Path

from anchorage.durability.faults import measure_faults
from anchorage.durability.ourrecipes import ALL_RECIPES
from anchorage.durability.profiles import PROFILES
from anchorage.durable import write_bytes
from anchorage.job import start_job, work_folder

job = start_job(snakemake)
path, profile = Path(snakemake.output[0]), PROFILES[snakemake.params.profile]
with work_folder(path) as folder:
    table = measure_faults([*ALL_RECIPES], folder, max_places=profile.max_places)
write_bytes(path, table.to_csv(index=False).encode())
