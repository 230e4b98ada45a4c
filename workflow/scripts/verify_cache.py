"""Does the cache still hold the captured bytes? -> verify.json; damage is removed, for the next run to capture anew."""

from pathlib import Path

from anchorage.durable import write_json
from anchorage.job import start_job
from anchorage.store.verify import repair, verify_cache

job = start_job(snakemake)
cache, parts = Path(snakemake.input.manifest).parent, [Path(part) for part in snakemake.input.parts]
report = verify_cache(cache, parts, depth=snakemake.params.depth, threads=snakemake.threads, log=job.log)
write_json(Path(snakemake.output[0]), report)
repair(cache, job.settings.staging / str(report["key"]), report, job.log)
job.log(f"ok {report['ok']}: {report['n_files']} files, {report['n_bytes']} bytes, depth {report['depth']}")
