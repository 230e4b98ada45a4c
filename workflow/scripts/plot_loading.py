"""loading.csv -> the figure of time and memory by method, cold and warm."""

from pathlib import Path

import pandas as pd

from anchorage.figures.loading import plot_loading
from anchorage.job import start_job

job = start_job(snakemake)
plot_loading(pd.read_csv(snakemake.input[0]), [Path(path) for path in snakemake.output])
