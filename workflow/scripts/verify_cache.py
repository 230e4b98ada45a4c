"""Does the cache still hold the captured bytes? -> verify.json; damage is removed, for the next run to capture anew."""

import json
from pathlib import Path

from anchorage.durable import write_json
from anchorage.job import start_job
from anchorage.store.identity import check_key, key_of
from anchorage.store.verify import repair, verify_cache

job = start_job(snakemake)
cache, parts = Path(snakemake.input.manifest).parent, [Path(part) for part in snakemake.input.parts]
key = key_of(job.settings, json.loads(Path(snakemake.input.model).read_text()))
report = verify_cache(cache, parts, depth=snakemake.params.depth, threads=snakemake.threads, log=job.log)
check_key(str(cache), report["key"] or key, key)
write_json(Path(snakemake.output[0]), report)
repair(cache, job.settings.staging / key, report=report, log=job.log)
job.log(f"ok {report['ok']}: {report['n_files']} files, {report['n_bytes']} bytes, depth {report['depth']}")
