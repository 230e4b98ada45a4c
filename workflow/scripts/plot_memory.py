"""memory_batches.csv, memory.csv, memory.json -> the figure of memory over the rows."""

import json
from pathlib import Path

import pandas as pd

from anchorage.figures.memory import plot_memory
from anchorage.job import start_job

job = start_job(snakemake)
batches, shards = pd.read_csv(snakemake.input.batches), pd.read_csv(snakemake.input.shards)
verdict = json.loads(Path(snakemake.input.verdict).read_text())
plot_memory(batches, shards, verdict, [Path(path) for path in snakemake.output])
