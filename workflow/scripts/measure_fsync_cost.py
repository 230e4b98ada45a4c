"""The costs of forcing bytes to the disk -> fsync_cost.csv, fsync_cost.json."""

from pathlib import Path

from anchorage.durability.disk import describe_disk
from anchorage.durability.fsynccost import measure_costs
from anchorage.durability.profiles import PROFILES
from anchorage.durable import write_bytes, write_json
from anchorage.job import start_job, work_folder

job = start_job(snakemake)
profile = PROFILES[snakemake.params.profile]
table = Path(snakemake.output.table)
with work_folder(table) as folder:
    costs = measure_costs(folder, **profile.costs, seed=snakemake.params.seed)
write_bytes(table, costs.to_csv(index=False).encode())
write_json(Path(snakemake.output.disk), describe_disk(table.parent))
