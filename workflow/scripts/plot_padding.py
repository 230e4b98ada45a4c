"""padding.csv, padding_norms.csv, padding.json -> the figure of errors by number of pads."""

import json
from pathlib import Path

import pandas as pd

from anchorage.figures.padding import plot_padding
from anchorage.job import start_job

job = start_job(snakemake)
report = json.loads(Path(snakemake.input.report).read_text())
table, norms = pd.read_csv(snakemake.input.table), pd.read_csv(snakemake.input.norms)
plot_padding(table, norms, report, [Path(path) for path in snakemake.output])
