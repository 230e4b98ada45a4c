"""What do pads do to a prompt? -> padding.json, padding.csv, padding_norms.csv."""

from pathlib import Path

import pandas as pd

from anchorage.durable import write_bytes, write_json
from anchorage.job import start_job
from anchorage.padding import COLUMNS, NORM_COLUMNS, measure_padding
from anchorage.plan import load_plan

job = start_job(snakemake)
plan = load_plan(job.settings, Path(snakemake.input.model), Path(snakemake.input.tokens))
report, table, norms = measure_padding(plan, job.log)
write_json(Path(snakemake.output.report), report)
write_bytes(Path(snakemake.output.table), pd.DataFrame(table, columns=COLUMNS).to_csv(index=False).encode())
write_bytes(Path(snakemake.output.norms), pd.DataFrame(norms, columns=NORM_COLUMNS).to_csv(index=False).encode())
