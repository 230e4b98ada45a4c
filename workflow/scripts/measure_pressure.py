"""Mapped and copied tensors under a memory limit -> pressure.csv."""

from pathlib import Path

import pandas as pd

from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.loading.pressure import COLUMNS, measure_pressure
from anchorage.loading.subject import read_subjects

job = start_job(snakemake)
key, subjects = read_subjects(Path(snakemake.input.subjects))
rows = measure_pressure(key, subjects["big"], log=job.log)
write_bytes(Path(snakemake.output[0]), pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False).encode())
