"""All rounds of costs -> costs.csv, costs.md."""

import json
from pathlib import Path

from anchorage.costs.cases import COMPARISONS
from anchorage.costs.rounds import tabulate_rounds
from anchorage.costs.sentences import describe_costs
from anchorage.durable import write_bytes
from anchorage.job import start_job
from anchorage.store.identity import key_of

job = start_job(snakemake)
key = key_of(job.settings, json.loads(Path(snakemake.input.model).read_text()))
table = tabulate_rounds([Path(path) for path in snakemake.input.rounds], key=key, comparisons=COMPARISONS)
write_bytes(Path(snakemake.output.table), table.to_csv(index=False).encode())
write_bytes(Path(snakemake.output.sentences), describe_costs(table, COMPARISONS).encode())
