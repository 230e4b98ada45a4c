"""Are malicious and lying files refused? -> refusals.csv, and the verdict, refusals.json."""

import tempfile
from pathlib import Path

import pandas as pd

from anchorage.durable import write_bytes, write_json
from anchorage.job import start_job
from anchorage.loading.refusals import COLUMNS, judge_refusals, refuse_files
from anchorage.loading.subject import read_subjects

job = start_job(snakemake)
key, _ = read_subjects(Path(snakemake.input.subjects))
with tempfile.TemporaryDirectory() as folder:
    table = refuse_files(Path(folder), key=key, log=job.log)
write_bytes(Path(snakemake.output.table), pd.DataFrame(table, columns=COLUMNS).to_csv(index=False).encode())
write_json(Path(snakemake.output.verdict), judge_refusals(table, key=key))
