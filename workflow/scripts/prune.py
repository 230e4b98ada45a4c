"""Remove staged shards of earlier configurations."""

import json
from pathlib import Path

from anchorage.job import start_job
from anchorage.store.identity import key_of
from anchorage.store.prune import prune_staging

job = start_job(snakemake)
prune_staging(job.settings.staging, key_of(job.settings, json.loads(Path(snakemake.input[0]).read_text())), job.log)
