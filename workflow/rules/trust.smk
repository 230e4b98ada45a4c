# Needs the cache. Makes verify.json, anchor.json, anchor_batches.*, memory.*, memory_batches.csv, extrapolation.json, a gate for each check.
# Guarantees: a check always writes its report; its gate fails the workflow on it.


rule verify_cache:
    input:
        model=MODEL_FACTS,
        manifest=f"{CACHE}/{MANIFEST}",
        parts=PART_LISTS,
    output:
        report(
            f"{RESULTS}/verify.json",
            caption="../report/verify.rst",
            category="5 Integrity",
            labels={"result": "Verification of every stored file (JSON)"},
        ),
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
        report=report(
            f"{RESULTS}/anchor.json",
            caption="../report/anchor.rst",
            category="1 Anchoring",
            labels={"result": "Stored rows against the model (JSON)"},
        ),
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
        check="verify|anchor|memory|controls|padding|refusals",
    conda:
        ENVIRONMENT
    params:
        # Padding is measured without a cache.
        manifest=lambda wildcards: (
            "" if wildcards.check == "padding" else f"{CACHE}/{MANIFEST}"
        ),
    script:
        "../scripts/gate.py"


rule plot_anchor:
    input:
        f"{RESULTS}/anchor_batches.csv",
    output:
        report(
            f"{RESULTS}/anchor_batches.svg",
            caption="../report/anchor_batches.rst",
            category="1 Anchoring",
            labels={"result": "Rows exact at each batch size (figure)"},
        ),
        f"{RESULTS}/anchor_batches.png",
    log:
        f"{LOGS}/plot_anchor.log",
    conda:
        ENVIRONMENT
    params:
        code=code_digest("figures.anchor", "figures.style"),
    script:
        "../scripts/plot_anchor.py"


rule table_memory:
    input:
        f"{CACHE}/{MANIFEST}",
    output:
        shards=report(
            f"{RESULTS}/memory.csv",
            caption="../report/memory.rst",
            category="2 Memory",
            labels={"result": "Memory and time of each shard (CSV)"},
        ),
        batches=f"{RESULTS}/memory_batches.csv",
    log:
        f"{LOGS}/table_memory.log",
    conda:
        ENVIRONMENT
    params:
        decides=DECIDES,
        code=code_digest("memory"),
    script:
        "../scripts/table_memory.py"


rule judge_memory:
    input:
        manifest=f"{CACHE}/{MANIFEST}",
        shards=f"{RESULTS}/memory.csv",
        batches=f"{RESULTS}/memory_batches.csv",
    output:
        report(
            f"{RESULTS}/memory.json",
            caption="../report/memory.rst",
            category="2 Memory",
            labels={"result": "Does memory grow with the rows? (JSON)"},
        ),
    log:
        f"{LOGS}/judge_memory.log",
    conda:
        ENVIRONMENT
    params:
        decides=DECIDES,
        memory=settings.memory.model_dump(),
        forecast_rows=settings.forecast_rows,
        code=code_digest("leak"),
    script:
        "../scripts/judge_memory.py"


rule plot_memory:
    input:
        shards=f"{RESULTS}/memory.csv",
        batches=f"{RESULTS}/memory_batches.csv",
        verdict=f"{RESULTS}/memory.json",
    output:
        report(
            f"{RESULTS}/memory.svg",
            caption="../report/memory.rst",
            category="2 Memory",
            labels={"result": "Memory over the rows (figure)"},
        ),
        f"{RESULTS}/memory.png",
    log:
        f"{LOGS}/plot_memory.log",
    conda:
        ENVIRONMENT
    params:
        code=code_digest("figures.memory", "figures.style"),
    script:
        "../scripts/plot_memory.py"


rule extrapolate:
    input:
        model=MODEL_FACTS,
        tokens=TOKENS,
        manifest=f"{CACHE}/{MANIFEST}",
        memory=f"{RESULTS}/memory.csv",
    output:
        report(
            EXTRAPOLATION_RESULTS,
            caption="../report/extrapolation.rst",
            category="8 Extrapolation",
            labels={
                "result": "Predicted and measured time and bytes, and a forecast (JSON)"
            },
        ),
    log:
        f"{LOGS}/extrapolate.log",
    conda:
        ENVIRONMENT
    params:
        decides=DECIDES,
        forecast_rows=settings.forecast_rows,
        code=code_digest("extrapolation", "forecast"),
    script:
        "../scripts/extrapolate.py"
