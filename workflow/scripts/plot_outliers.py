"""outliers.csv, outlier_dimensions.csv -> the figure of sizes and outlier dimensions by site."""

from pathlib import Path

import pandas as pd

from anchorage.figures.outliers import plot_outliers
from anchorage.job import start_job

job = start_job(snakemake)
table, dimensions = pd.read_csv(snakemake.input.table), pd.read_csv(snakemake.input.dimensions)
plot_outliers(table, dimensions, [Path(path) for path in snakemake.output])
