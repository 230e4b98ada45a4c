# Needs all results that the report shows. Makes overview.rst, the report's first page; `make report` makes report.html.
# Guarantees: no result of another capture key is described, none that the present configuration does not make.


# Snakemake reads it when it makes the report, and from the folder of this file were the path not absolute.
report: str(Path(OVERVIEW_RESULTS[0]).absolute())


PROBE_FINDINGS = {
    "sweep": f"{RESULTS}/sweep.csv",
    "sweep_figure": f"{RESULTS}/sweep.svg",
    "controls": f"{RESULTS}/controls.json",
}


rule describe_run:
    input:
        **(PROBE_FINDINGS if settings.probe else {}),
        **({"loading": f"{RESULTS}/loading.csv"} if settings.loading else {}),
        model=MODEL_FACTS,
        corpus=CORPUS_FACTS,
        manifest=f"{CACHE}/{MANIFEST}",
        verify=f"{RESULTS}/verify.json",
        anchor=f"{RESULTS}/anchor.json",
        anchor_figure=f"{RESULTS}/anchor_batches.svg",
        memory=f"{RESULTS}/memory.csv",
        leak=f"{RESULTS}/memory.json",
        memory_figure=f"{RESULTS}/memory.svg",
        extrapolation=f"{RESULTS}/extrapolation.json",
        outliers=f"{RESULTS}/outliers.csv",
    output:
        OVERVIEW_RESULTS,
    log:
        f"{LOGS}/describe_run.log",
    conda:
        ENVIRONMENT
    params:
        decides=DECIDES,
        code=code_digest(
            "overview", "rst", "forecast", "loading.summary", "loading.uses"
        ),
    script:
        "../scripts/describe_run.py"
