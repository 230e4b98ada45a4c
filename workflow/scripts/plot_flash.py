"""flash.csv -> the figure of write amplification."""

from pathlib import Path

import pandas as pd

from anchorage.figures.flash import plot_flash
from anchorage.job import start_job

job = start_job(snakemake)
plot_flash(pd.read_csv(snakemake.input[0]), [Path(path) for path in snakemake.output])
