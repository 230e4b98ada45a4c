"""The outlier dimensions of every stored site -> outliers.csv, outlier_dimensions.csv."""

from pathlib import Path

import pandas as pd
import torch

from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.outliers import COLUMNS, DIMENSION_COLUMNS, measure_outliers
from anchorage.store.reader import open_cache

job = start_job(snakemake)
torch.set_num_threads(1)  # bound by memory: beside other jobs, threads waited for each other ten times the work's time
table, dimensions = measure_outliers(open_cache(Path(snakemake.input.manifest).parent))
write_bytes(Path(snakemake.output.table), pd.DataFrame(table, columns=COLUMNS).to_csv(index=False).encode())
dimension_csv = pd.DataFrame(dimensions, columns=DIMENSION_COLUMNS).to_csv(index=False)
write_bytes(Path(snakemake.output.dimensions), dimension_csv.encode())
