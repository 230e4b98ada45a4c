"""Power cuts of a small whole run -> workflow_cuts.csv."""

from pathlib import Path

from anchorage.durability.profiles import PROFILES
from anchorage.durability.smallrun import cut_small_run
from anchorage.durable import write_bytes
from anchorage.job import start_job, work_folder

job = start_job(snakemake)
path, profile = Path(snakemake.output[0]), PROFILES[snakemake.params.profile]
with work_folder(path) as folder:
    table = cut_small_run(
        job.settings,
        Path(snakemake.params.root),
        folder=folder,
        points=profile.workflow,
        seed=snakemake.params.seed,
        log=job.log,
    )
write_bytes(path, table.to_csv(index=False).encode())
