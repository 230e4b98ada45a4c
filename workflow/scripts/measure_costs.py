"""One round of the comparisons of costs -> costs/round-{round}.csv."""

from pathlib import Path

from anchorage.costs.cases import COMPARISONS
from anchorage.costs.rounds import measure_round
from anchorage.driver import name_driver
from anchorage.durable import write_bytes
from anchorage.job import start_job

job = start_job(snakemake)
name_driver()  # of the cases' processes: they end when this job does
table = measure_round(
    job.settings,
    Path(snakemake.input.model),
    Path(snakemake.input.tokens),
    number=int(snakemake.wildcards.round),
    comparisons=COMPARISONS,
    log=job.log,
)
write_bytes(Path(snakemake.output[0]), table.to_csv(index=False).encode())
