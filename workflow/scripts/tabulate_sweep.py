"""All probes -> sweep.csv."""

import json
from pathlib import Path

from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.probe.sweep import tabulate_sweep

job = start_job(snakemake)
controls = json.loads(Path(snakemake.input.controls).read_text())
table = tabulate_sweep([Path(path) for path in snakemake.input.probes], controls, seed=job.settings.seed)
write_bytes(Path(snakemake.output[0]), table.to_csv(index=False).encode())
