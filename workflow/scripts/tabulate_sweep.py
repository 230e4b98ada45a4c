"""All probes -> sweep.csv."""

import json
from pathlib import Path

from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.probe.sweep import tabulate_sweep

job = start_job(snakemake)
controls = json.loads(Path(snakemake.input.controls).read_text())
paths = [Path(path) for path in snakemake.input.probes]
table = tabulate_sweep(paths, controls, seed=job.settings.seed, log=job.log)
write_bytes(Path(snakemake.output[0]), table.to_csv(index=False).encode())
