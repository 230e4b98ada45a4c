"""Does the cache still equal the model? -> anchor.json, anchor_batches.csv."""

from pathlib import Path

import pandas as pd

from anchorage.anchor import anchor_cache
from anchorage.durable import write_bytes, write_json
from anchorage.job import start_job
from anchorage.plan import load_plan
from anchorage.store.reader import open_cache

job = start_job(snakemake)
plan = load_plan(job.settings, Path(snakemake.input.model), Path(snakemake.input.tokens))
report, batches = anchor_cache(plan, open_cache(Path(snakemake.input.manifest).parent), job.log)
write_json(Path(snakemake.output.report), report)
write_bytes(Path(snakemake.output.batches), pd.DataFrame(batches).to_csv(index=False).encode())
