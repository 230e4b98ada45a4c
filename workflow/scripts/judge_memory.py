"""memory.csv, memory_batches.csv -> memory.json: does memory grow with the rows?"""

from pathlib import Path

import pandas as pd

from anchorage.durable import write_json
from anchorage.job import start_job
from anchorage.leak import judge_memory
from anchorage.store.manifest import read_manifest

job = start_job(snakemake)
verdict = judge_memory(
    pd.read_csv(snakemake.input.batches),
    pd.read_csv(snakemake.input.shards),
    key=read_manifest(Path(snakemake.input.manifest)).key,
    forecast_rows=job.settings.forecast_rows,
    on_leak=job.settings.memory.on_leak,
)
job.log(verdict["warning"] or verdict["reason"])
write_json(Path(snakemake.output[0]), verdict)
