"""Power cuts on one filesystem -> power_cuts/{filesystem}.csv."""

from pathlib import Path

from anchorage.durability.profiles import PROFILES, cut_filesystem
from anchorage.durable import write_bytes
from anchorage.job import start_job, work_folder

job = start_job(snakemake)
path, profile = Path(snakemake.output[0]), PROFILES[snakemake.params.profile]
with work_folder(path) as folder:
    table = cut_filesystem(
        snakemake.wildcards.filesystem, profile, folder=folder, seed=snakemake.params.seed, log=job.log
    )
write_bytes(path, table.to_csv(index=False).encode())
