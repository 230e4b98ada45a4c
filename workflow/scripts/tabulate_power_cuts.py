"""power_cuts/{filesystem}.csv -> power_cuts.csv."""

from pathlib import Path

import pandas as pd

from anchorage.durable import write_bytes
from anchorage.job import start_job

job = start_job(snakemake)
table = pd.concat(map(pd.read_csv, snakemake.input))
write_bytes(Path(snakemake.output[0]), table.to_csv(index=False).encode())
