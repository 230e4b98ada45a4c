# Needs the cache. Makes verify.json, anchor.json, anchor_batches.*, memory.csv, and a gate for each check.
# Guarantees: a check always writes its report; its gate fails the workflow on it.


rule verify_cache:
    input:
        model=MODEL_FACTS,
        manifest=f"{CACHE}/{MANIFEST}",
        parts=PART_LISTS,
    output:
        f"{RESULTS}/verify.json",
    log:
        f"{LOGS}/verify_cache.log",
    conda:
        ENVIRONMENT
    threads: 2
    params:
        decides=DECIDES,
        depth=settings.verify.depth,
    script:
        "../scripts/verify_cache.py"


rule anchor_cache:
    input:
        manifest=f"{CACHE}/{MANIFEST}",
        verified=f"{RESULTS}/gates/verify.ok",
        model=MODEL_FACTS,
        tokens=TOKENS,
    output:
        report=f"{RESULTS}/anchor.json",
        batches=f"{RESULTS}/anchor_batches.csv",
    log:
        f"{LOGS}/anchor_cache.log",
    conda:
        ENVIRONMENT
    threads: CAPTURE_THREADS
    params:
        decides=DECIDES,
        anchor=settings.anchor.model_dump(),
        seed=settings.seed,
    script:
        "../scripts/anchor_cache.py"


rule gate:
    input:
        report=f"{RESULTS}/{{check}}.json",
    output:
        f"{RESULTS}/gates/{{check}}.ok",
    log:
        f"{LOGS}/gate_{{check}}.log",
    wildcard_constraints:
        check="verify|anchor",
    conda:
        ENVIRONMENT
    params:
        manifest=f"{CACHE}/{MANIFEST}",
    script:
        "../scripts/gate.py"


rule plot_anchor:
    input:
        f"{RESULTS}/anchor_batches.csv",
    output:
        multiext(f"{RESULTS}/anchor_batches", ".svg", ".png"),
    log:
        f"{LOGS}/plot_anchor.log",
    conda:
        ENVIRONMENT
    script:
        "../scripts/plot_anchor.py"


rule table_memory:
    input:
        f"{CACHE}/{MANIFEST}",
    output:
        f"{RESULTS}/memory.csv",
    log:
        f"{LOGS}/table_memory.log",
    conda:
        ENVIRONMENT
    params:
        decides=DECIDES,
    script:
        "../scripts/table_memory.py"
