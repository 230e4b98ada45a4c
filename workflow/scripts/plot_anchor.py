"""anchor_batches.csv -> the figure of which batch sizes stay exact."""

from pathlib import Path

import pandas as pd

from anchorage.figures.anchor import plot_anchor_batches
from anchorage.job import start_job

job = start_job(snakemake)
plot_anchor_batches(pd.read_csv(snakemake.input[0]), [Path(path) for path in snakemake.output])
