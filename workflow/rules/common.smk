# Needs the configuration; makes nothing. Guarantees: a checked configuration, sources that exist, the names of results.
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

from anchorage.costs.comparison import ROUNDS
from anchorage.digest import code_digest
from anchorage.driver import name_driver
from anchorage.durability.mounts import FILESYSTEMS, why_not
from anchorage.errors import AnchorageError
from anchorage.job import (
    check_folders,
    hold_run,
    leak_warning,
    rule_threads,
    warn_of_slow_start,
)
from anchorage.loading.methods import check_methods, draw_order
from anchorage.probe.labels import task_digest
from anchorage.probe.targets import check_probe, group_sites, probed_sites
from anchorage.settings import load_settings
from anchorage.sources import check_sources, local_inputs
from anchorage.store.layout import layout_of
from anchorage.store.names import (
    MANIFEST,
    SHARD_FORMAT,
    published_part,
    published_shard,
)

try:
    settings = load_settings(config)
    check_sources(settings)
    check_folders(settings)
    check_probe(settings)
    check_methods(settings)
    PROBE_SITES = probed_sites(settings)
except AnchorageError as error:
    raise WorkflowError(str(error)) from None

name_driver()
layout = layout_of(settings)
PART_RULES = layout.part_rules()
if warning := warn_of_slow_start(layout):
    logger.warning(warning)
RESULTS = f"results/{settings.run}"
LOGS = f"results/{settings.run}/logs"
CACHE = f"{RESULTS}/cache"
MODEL_FACTS = f"{RESULTS}/model.json"
TOKENS = f"{RESULTS}/corpus/tokens.safetensors"
CORPUS_FACTS = f"{RESULTS}/corpus/corpus.json"
PART_LISTS = [f"{CACHE}/{published_part(part)}" for part in layout.parts]
ENVIRONMENT = "../envs/anchorage.yaml"
# The forward pass takes the keyed number of threads; this is its share of the cores Snakemake may use.
CAPTURE_THREADS = rule_threads(settings.capture.threads, workflow.cores)
# A job that claims them all runs alone wherever the limit of profiles/default holds; its threads do the same on one
# machine.
ALL_SLOTS = 100
# Of jobs that keep one processor busy.
ONE_THREAD = rule_threads(1, workflow.cores)

# What decides the captured values. It is a parameter of every later rule too: were it the capture's alone, a capture that
# fails after a change would leave the old reports looking up to date to whoever asks for one of them by name.
DECIDES = {
    "format": SHARD_FORMAT,
    "model": settings.model.model_dump(),
    "corpus": settings.corpus.model_dump(),
    "capture": settings.capture.model_dump(
        exclude={"parts", "staging_dir", "overlap_copies"}
    ),
}

CORPUS_RESULTS = [MODEL_FACTS, TOKENS, CORPUS_FACTS]
CACHE_RESULTS = [
    f"{CACHE}/{published_shard(tier, part, index)}"
    for rule_ in PART_RULES
    for part in rule_.parts
    for tier, n_shards in rule_.n_shards.items()
    for index in range(n_shards)
] + [*PART_LISTS, f"{CACHE}/{MANIFEST}"]
# Shards are not listed: a check of what is there must not make them anew first.
VERIFY_RESULTS = [
    *PART_LISTS,
    f"{CACHE}/{MANIFEST}",
    f"{RESULTS}/verify.json",
    f"{RESULTS}/gates/verify.ok",
]
ANCHOR_RESULTS = [
    f"{RESULTS}/anchor.json",
    f"{RESULTS}/anchor_batches.csv",
    f"{RESULTS}/anchor_batches.svg",
    f"{RESULTS}/anchor_batches.png",
    f"{RESULTS}/gates/anchor.ok",
]
MEMORY_RESULTS = [
    f"{RESULTS}/memory.csv",
    f"{RESULTS}/memory_batches.csv",
    f"{RESULTS}/memory.json",
    f"{RESULTS}/memory.svg",
    f"{RESULTS}/memory.png",
    f"{RESULTS}/gates/memory.ok",
]
EXTRAPOLATION_RESULTS = [f"{RESULTS}/extrapolation.json"]
PLAN_RESULTS = [f"{RESULTS}/plan.json"]
PROBE_TASKS = settings.probe.tasks if settings.probe else []
SITE_GROUPS = group_sites(PROBE_SITES)
PROBE_FILES = [
    f"{RESULTS}/probe/{task}/{site}.json"
    for task in PROBE_TASKS
    for site in PROBE_SITES
]
PROBE_RESULTS = [
    *PROBE_FILES,
    *(
        f"{RESULTS}/{name}"
        for name in (
            "controls.json",
            "gates/controls.ok",
            "sweep.csv",
            "sweep.svg",
            "sweep.png",
        )
        if settings.probe
    ),
]
OUTLIER_RESULTS = [
    f"{RESULTS}/{name}"
    for name in (
        "outliers.csv",
        "outlier_dimensions.csv",
        "outliers.svg",
        "outliers.png",
    )
]
PADDING_RESULTS = [
    f"{RESULTS}/{name}"
    for name in (
        "padding.json",
        "gates/padding.ok",
        "padding.csv",
        "padding_norms.csv",
        "padding.svg",
        "padding.png",
    )
]
COST_ROUNDS = [f"{RESULTS}/costs/round-{round}.csv" for round in range(ROUNDS)]
COSTS_RESULTS = [
    *COST_ROUNDS,
    *(
        f"{RESULTS}/{name}"
        for name in ("costs.csv", "costs.md", "costs.svg", "costs.png")
    ),
]
LOADING = f"{RESULTS}/loading"
# Temporary: with them a default run would leave 2 GB behind.
LOADED_FILES = [
    "weights.pt",
    "weights.safetensors",
    "big.pt",
    "big.safetensors",
    "shard.pt",
]
SUBJECTS = ["weights", "big", "shard"]
LOADING_ORDER = draw_order(settings, SUBJECTS)
LOADING_TABLES = [
    f"{LOADING}/{subject}/{method}.csv" for subject, method in LOADING_ORDER
]
MEASURED_BY = (
    "digest",
    "diskio",
    "loading.forward",
    "loading.fresh",
    "loading.measuring",
    "loading.methods",
    "loading.pagecache",
    "loading.raw",
    "loading.subject",
    "loading.trial",
    "memory",
    "store.format",
    "store.manifest",
    "store.reader",
    "store.shardfile",
    "tensorfile",
)
LOADING_RESULTS = [
    f"{RESULTS}/{name}"
    for name in (
        "loading.csv",
        "workers.csv",
        "pressure.csv",
        "device_copy.csv",
        "accident.csv",
        "refusals.csv",
        "refusals.json",
        "gates/refusals.ok",
        "loading.svg",
        "loading.png",
        "loading.md",
    )
    if settings.loading
] + LOADING_TABLES
# It judges code and a disk, not a run.
LAB = "results/durability"
JUDGED_CODE = code_digest(
    "checkpoint",
    "digest",
    "durability.ourrecipes",
    "durability.profiles",
    "durability.recipes",
    "durability.torchrecipes",
    "durable",
    "statetree",
    "store.format",
    "store.layout",
    "store.manifest",
    "store.names",
    "store.shardfile",
    "store.staging",
    "tensorfile",
)
CUT_CODE = code_digest(
    "durability.fuseserver",
    "durability.logdisk",
    "durability.mounts",
    "durability.powercut",
    "durability.recording",
    "durability.replay",
    "durability.schedules",
)
LAB_TABLES = [
    "power_cuts",
    "kill_points",
    "legal_states",
    "workflow_cuts",
    "faults",
    "syscalls",
    "fsync_cost",
    "flash",
]
# Where no power can be cut its table says why, and needs no model.
WHOLE_RUN_INPUTS = (
    []
    if why_not(FILESYSTEMS["ext4"])
    else local_inputs(settings.model.source) + local_inputs(settings.corpus.source)
)
CUT_TABLES = [f"{LAB}/power_cuts/{name}.csv" for name in FILESYSTEMS]
DURABILITY_RESULTS = [
    *(f"{LAB}/{name}.csv" for name in LAB_TABLES),
    *(
        f"{LAB}/{name}"
        for name in (
            "fsync_cost.json",
            "flash.svg",
            "flash.png",
            "durability.json",
            "gates/durability.ok",
            "durability.md",
            "durability.svg",
            "durability.png",
        )
    ),
]
OVERVIEW_RESULTS = [f"{RESULTS}/overview.rst"]
