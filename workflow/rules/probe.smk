# Needs the verified cache. Makes probe/{task}/{site}.json, sweep.*, controls.json and its gate, outliers.*.
# Guarantees: an edited task remakes its own probes, a new seed all of them, neither the cache; the run fails (gate) where
# position or token id alone scores anything but chance though the task's cells promise it.

# A job takes several sites: starting one costs as much as some probes do.
for group, sites in enumerate(SITE_GROUPS):

    rule:
        name:
            f"fit_probes_{group}"
        input:
            manifest=f"{CACHE}/{MANIFEST}",
            verified=f"{RESULTS}/gates/verify.ok",
        output:
            [f"{RESULTS}/probe/{{task}}/{site}.json" for site in sites],
        log:
            f"{LOGS}/fit_probes_{{task}}_{group}.log",
        wildcard_constraints:
            task="|".join(settings.probe.tasks),
        conda:
            ENVIRONMENT
        threads: ONE_THREAD
        params:
            decides=DECIDES,
            probe=settings.probe.model_dump(exclude={"tasks"}),
            seed=settings.seed,
            code=lambda wildcards: task_digest(wildcards.task),
        script:
            "../scripts/fit_probes.py"


if settings.probe:

    rule control_probes:
        input:
            manifest=f"{CACHE}/{MANIFEST}",
            verified=f"{RESULTS}/gates/verify.ok",
        output:
            report(
                f"{RESULTS}/controls.json",
                caption="../report/controls.rst",
                category="3 Layer sweep",
                labels={
                    "result": "Controls: what position or token id alone can tell (JSON)"
                },
            ),
        log:
            f"{LOGS}/control_probes.log",
        conda:
            ENVIRONMENT
        params:
            decides=DECIDES,
            probe=settings.probe.model_dump(),
            seed=settings.seed,
            code=[code_digest("probe.sweep"), *map(task_digest, PROBE_TASKS)],
        script:
            "../scripts/control_probes.py"

    rule tabulate_sweep:
        input:
            probes=PROBE_FILES,
            controls=f"{RESULTS}/controls.json",
        output:
            report(
                f"{RESULTS}/sweep.csv",
                caption="../report/sweep.rst",
                category="3 Layer sweep",
                labels={"result": "Accuracy of every probe (CSV)"},
            ),
        log:
            f"{LOGS}/tabulate_sweep.log",
        conda:
            ENVIRONMENT
        params:
            decides=DECIDES,
            seed=settings.seed,
            code=code_digest("probe.sweep", "probe.intervals"),
        script:
            "../scripts/tabulate_sweep.py"

    rule plot_sweep:
        input:
            f"{RESULTS}/sweep.csv",
        output:
            report(
                f"{RESULTS}/sweep.svg",
                caption="../report/sweep.rst",
                category="3 Layer sweep",
                labels={"result": "Accuracy by site (figure)"},
            ),
            f"{RESULTS}/sweep.png",
        log:
            f"{LOGS}/plot_sweep.log",
        conda:
            ENVIRONMENT
        params:
            code=code_digest("figures.sweep", "figures.style"),
        script:
            "../scripts/plot_sweep.py"


rule measure_outliers:
    input:
        manifest=f"{CACHE}/{MANIFEST}",
        verified=f"{RESULTS}/gates/verify.ok",
    output:
        table=report(
            f"{RESULTS}/outliers.csv",
            caption="../report/outliers.rst",
            category="4 Outlier dimensions",
            labels={
                "result": "RMS, maxima and outlier dimensions of every site (CSV)"
            },
        ),
        dimensions=f"{RESULTS}/outlier_dimensions.csv",
    log:
        f"{LOGS}/measure_outliers.log",
    conda:
        ENVIRONMENT
    threads: ONE_THREAD
    params:
        decides=DECIDES,
        code=code_digest("outliers", "sites"),
    script:
        "../scripts/measure_outliers.py"


rule plot_outliers:
    input:
        table=f"{RESULTS}/outliers.csv",
        dimensions=f"{RESULTS}/outlier_dimensions.csv",
    output:
        report(
            f"{RESULTS}/outliers.svg",
            caption="../report/outliers.rst",
            category="4 Outlier dimensions",
            labels={"result": "Outlier dimensions by site (figure)"},
        ),
        f"{RESULTS}/outliers.png",
    log:
        f"{LOGS}/plot_outliers.log",
    conda:
        ENVIRONMENT
    params:
        code=code_digest("figures.outliers", "figures.style"),
    script:
        "../scripts/plot_outliers.py"
