# Needs the model, the token rows and the cache. Makes loading.*, workers.csv, pressure.csv, device_copy.csv, accident.csv and
# refusals.csv: what it costs to load a file, cold and warm. Guarantees: a measurement runs alone, and proves its state.


rule write_subjects:
    input:
        model=MODEL_FACTS,
        manifest=f"{CACHE}/{MANIFEST}",
        verified=f"{RESULTS}/gates/verify.ok",
    output:
        subjects=f"{LOADING}/subjects.json",
        files=[temp(f"{LOADING}/{name}") for name in LOADED_FILES],
    log:
        f"{LOGS}/write_subjects.log",
    conda:
        ENVIRONMENT
    params:
        decides=DECIDES,
        seed=settings.seed,
        big_mib=settings.loading and settings.loading.big_mib,
        code=code_digest(
            "loading.raw", "loading.subject", "loading.subjects", "tensorfile"
        ),
    script:
        "../scripts/write_subjects.py"


rule measure_loading:
    input:
        subjects=f"{LOADING}/subjects.json",
        files=[f"{LOADING}/{name}" for name in LOADED_FILES],
    output:
        f"{LOADING}/{{subject}}/{{method}}.csv",
    log:
        f"{LOGS}/measure_loading_{{subject}}_{{method}}.log",
    wildcard_constraints:
        subject="|".join(SUBJECTS),
        method="[^/]+",
    # In an order drawn with the seed, so that a drift of the machine favours no method.
    priority: lambda wildcards: LOADING_ORDER[wildcards.subject, wildcards.method]
    conda:
        ENVIRONMENT
    threads: workflow.cores
    resources:
        slots=ALL_SLOTS,
    params:
        seed=settings.seed,
        repeats=settings.loading and settings.loading.repeats,
        drop_caches=settings.loading and settings.loading.drop_caches,
        code=code_digest(*MEASURED_BY),
    script:
        "../scripts/measure_loading.py"


rule measure_workers:
    input:
        subjects=f"{LOADING}/subjects.json",
        files=[f"{LOADING}/{name}" for name in LOADED_FILES],
    output:
        report(
            f"{RESULTS}/workers.csv",
            caption="../report/workers.rst",
            category="9 Loading",
            labels={"result": "Memory of processes that hold the same weights (CSV)"},
        ),
    log:
        f"{LOGS}/measure_workers.log",
    conda:
        ENVIRONMENT
    threads: workflow.cores
    resources:
        slots=ALL_SLOTS,
    params:
        seed=settings.seed,
        methods=settings.loading and settings.loading.methods,
        code=code_digest(*MEASURED_BY, "loading.workers"),
    script:
        "../scripts/measure_workers.py"


rule measure_pressure:
    input:
        subjects=f"{LOADING}/subjects.json",
        files=[f"{LOADING}/{name}" for name in LOADED_FILES],
    output:
        report(
            f"{RESULTS}/pressure.csv",
            caption="../report/pressure.rst",
            category="9 Loading",
            labels={"result": "Mapped and copied tensors under a memory limit (CSV)"},
        ),
    log:
        f"{LOGS}/measure_pressure.log",
    conda:
        ENVIRONMENT
    threads: workflow.cores
    resources:
        slots=ALL_SLOTS,
    params:
        code=code_digest(*MEASURED_BY, "loading.memorygroup", "loading.pressure"),
    script:
        "../scripts/measure_pressure.py"


rule measure_device_copy:
    input:
        subjects=f"{LOADING}/subjects.json",
        files=[f"{LOADING}/{name}" for name in LOADED_FILES],
    output:
        report(
            f"{RESULTS}/device_copy.csv",
            caption="../report/device_copy.rst",
            category="9 Loading",
            labels={"result": "Copies to the GPU (CSV)"},
        ),
    log:
        f"{LOGS}/measure_device_copy.log",
    conda:
        ENVIRONMENT
    threads: workflow.cores
    resources:
        slots=ALL_SLOTS,
    params:
        seed=settings.seed,
        repeats=settings.loading and settings.loading.repeats,
        code=code_digest(*MEASURED_BY, "loading.devicecopy"),
    script:
        "../scripts/measure_device_copy.py"


rule show_accident:
    input:
        subjects=f"{LOADING}/subjects.json",
        files=[f"{LOADING}/{name}" for name in LOADED_FILES],
    output:
        report(
            f"{RESULTS}/accident.csv",
            caption="../report/accident.rst",
            category="9 Loading",
            labels={"result": "The page cache measured by accident (CSV)"},
        ),
    log:
        f"{LOGS}/show_accident.log",
    conda:
        ENVIRONMENT
    threads: workflow.cores
    resources:
        slots=ALL_SLOTS,
    params:
        code=code_digest(*MEASURED_BY, "loading.accident"),
    script:
        "../scripts/show_accident.py"


rule refuse_files:
    input:
        subjects=f"{LOADING}/subjects.json",
    output:
        table=report(
            f"{RESULTS}/refusals.csv",
            caption="../report/refusals.rst",
            category="9 Loading",
            labels={"result": "Malicious and lying files, refused (CSV)"},
        ),
        verdict=f"{RESULTS}/refusals.json",
    log:
        f"{LOGS}/refuse_files.log",
    conda:
        ENVIRONMENT
    params:
        code=code_digest(
            "digest",
            "durable",
            "loading.fresh",
            "loading.lies",
            "loading.refusals",
            "store.format",
            "store.manifest",
            "store.reader",
            "store.shardfile",
            "tensorfile",
        ),
    script:
        "../scripts/refuse_files.py"


rule tabulate_loading:
    input:
        subjects=f"{LOADING}/subjects.json",
        tables=LOADING_TABLES,
    output:
        report(
            f"{RESULTS}/loading.csv",
            caption="../report/loading.rst",
            category="9 Loading",
            labels={"result": "Every measurement of loading (CSV)"},
        ),
    log:
        f"{LOGS}/tabulate_loading.log",
    conda:
        ENVIRONMENT
    params:
        decides=DECIDES,
        code=code_digest("loading.measuring"),
    script:
        "../scripts/tabulate_loading.py"


rule plot_loading:
    input:
        f"{RESULTS}/loading.csv",
    output:
        report(
            f"{RESULTS}/loading.svg",
            caption="../report/loading.rst",
            category="9 Loading",
            labels={"result": "Time and memory by method, cold and warm (figure)"},
        ),
        f"{RESULTS}/loading.png",
    log:
        f"{LOGS}/plot_loading.log",
    conda:
        ENVIRONMENT
    params:
        code=code_digest("figures.loading", "figures.style", "loading.summary"),
    script:
        "../scripts/plot_loading.py"


rule advise_loading:
    input:
        subjects=f"{LOADING}/subjects.json",
        loading=f"{RESULTS}/loading.csv",
        workers=f"{RESULTS}/workers.csv",
        pressure=f"{RESULTS}/pressure.csv",
        device_copy=f"{RESULTS}/device_copy.csv",
        accident=f"{RESULTS}/accident.csv",
        refusals=f"{RESULTS}/refusals.csv",
    output:
        report(
            f"{RESULTS}/loading.md",
            caption="../report/advice.rst",
            category="9 Loading",
            labels={
                "result": "Which method for which use, and which claims hold here (Markdown)"
            },
        ),
    log:
        f"{LOGS}/advise_loading.log",
    conda:
        ENVIRONMENT
    params:
        decides=DECIDES,
        code=code_digest(
            "loading.advice",
            "loading.claims",
            "loading.methods",
            "loading.puzzle",
            "loading.summary",
            "loading.uses",
        ),
    script:
        "../scripts/advise_loading.py"
