"""sweep.csv -> the figure of accuracy by site."""

from pathlib import Path

import pandas as pd

from anchorage.figures.sweep import plot_sweep
from anchorage.job import start_job

job = start_job(snakemake)
plot_sweep(pd.read_csv(snakemake.input[0]), [Path(path) for path in snakemake.output])
