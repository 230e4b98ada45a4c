"""The model of a drive -> flash.csv."""

from pathlib import Path

from anchorage.durability.flash import sweep_flash
from anchorage.durability.profiles import PROFILES
from anchorage.durable import write_bytes
from anchorage.job import start_job

job = start_job(snakemake)
table = sweep_flash(seed=snakemake.params.seed, n_blocks=PROFILES[snakemake.params.profile].n_blocks)
write_bytes(Path(snakemake.output[0]), table.to_csv(index=False).encode())
