"""The lab's tables -> durability.md and its figure."""

import json
from pathlib import Path

from anchorage.durability.findings import describe_durability, layers, survival
from anchorage.durability.verdict import read_tables
from anchorage.durable import write_bytes
from anchorage.figures.durability import plot_durability
from anchorage.job import start_job

job = start_job(snakemake)
paths = {name: Path(path) for name, path in snakemake.input.items()}
verdict, disk = (json.loads(paths.pop(name).read_text()) for name in ("verdict", "disk"))
tables = read_tables(paths)
write_bytes(Path(snakemake.output[0]), describe_durability(tables, verdict, disk).encode())
plot_durability(layers(tables), survival(tables), [Path(path) for path in snakemake.output[1:]])
