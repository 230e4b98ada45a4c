"""costs.csv -> the figure of time and peak memory of the cases compared."""

from pathlib import Path

import pandas as pd

from anchorage.figures.costs import plot_costs
from anchorage.job import start_job

job = start_job(snakemake)
plot_costs(pd.read_csv(snakemake.input[0]), [Path(path) for path in snakemake.output])
