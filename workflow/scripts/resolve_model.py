"""What the configured model turns out to be -> model.json."""

from pathlib import Path

from anchorage.durable import write_json
from anchorage.job import start_job
from anchorage.model import resolve_model

job = start_job(snakemake)
facts = resolve_model(job.settings.model, threads=job.settings.capture.threads, n_cores=snakemake.threads)
write_json(Path(snakemake.output[0]), facts)
job.log(f"{facts['source']}: weights {facts['weights_digest']}, {facts['device']}, {facts['threads']} threads")
