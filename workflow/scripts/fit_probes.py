"""The probes of one task at several sites -> probe/{task}/{site}.json."""

from pathlib import Path

from anchorage.job import start_job
from anchorage.probe.design import design_task
from anchorage.probe.site import fit_sites
from anchorage.store.reader import open_cache

job, task = start_job(snakemake), snakemake.wildcards.task
cache, probe, seed = open_cache(Path(snakemake.input.manifest).parent), job.settings.probe, job.settings.seed
design = design_task(cache, task, settings=probe, seed=seed)
fit_sites(cache, [Path(path) for path in snakemake.output], design=design, settings=probe, seed=seed, log=job.log)
