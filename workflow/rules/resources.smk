# Needs the network, once. Makes the embedded model and corpus, and what the configured model turns out to be.
# Guarantees: digests of downloads checked; commit and digests of the model resolved once a run.
from anchorage.resources import (
    CORPUS_FILES,
    DEFAULT_CORPUS,
    DEFAULT_MODEL,
    MODEL_FILES,
    RANDOM_MODEL,
)


rule fetch_model:
    output:
        [f"{DEFAULT_MODEL}/{name}" for name in MODEL_FILES],
    log:
        "resources/logs/fetch_model.log",
    conda:
        ENVIRONMENT
    script:
        "../scripts/fetch_model.py"


# Wanted by config/random-weights.yaml alone.
rule make_random_model:
    input:
        [f"{DEFAULT_MODEL}/{name}" for name in MODEL_FILES],
    output:
        [f"{RANDOM_MODEL}/{name}" for name in MODEL_FILES],
    log:
        "resources/logs/make_random_model.log",
    conda:
        ENVIRONMENT
    script:
        "../scripts/make_random_model.py"


rule fetch_corpus:
    output:
        [f"{Path(DEFAULT_CORPUS).parent}/{name}" for name in CORPUS_FILES],
    log:
        "resources/logs/fetch_corpus.log",
    conda:
        ENVIRONMENT
    script:
        "../scripts/fetch_corpus.py"


rule resolve_model:
    input:
        local_inputs(settings.model.source),
    output:
        MODEL_FACTS,
    log:
        f"{LOGS}/resolve_model.log",
    conda:
        ENVIRONMENT
    # Not for its own work: threads are no reason to run it anew, and `capture.threads: auto` is fixed by what it is given.
    threads: workflow.cores
    params:
        model=settings.model.model_dump(),
        threads=settings.capture.threads,
    script:
        "../scripts/resolve_model.py"
