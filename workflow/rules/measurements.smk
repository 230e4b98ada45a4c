# Needs the model and the token rows. Makes costs.* and padding.*: what the flags of a capture cost, what pads do.
# Guarantees: nothing is measured while another job of the run is at work; no figure without its spread.


rule measure_padding:
    input:
        model=MODEL_FACTS,
        tokens=TOKENS,
    output:
        report=f"{RESULTS}/padding.json",
        table=report(
            f"{RESULTS}/padding.csv",
            caption="../report/padding.rst",
            category="7 Padding",
            labels={"result": "Padded prompts against the prompts alone (CSV)"},
        ),
        norms=f"{RESULTS}/padding_norms.csv",
    log:
        f"{LOGS}/measure_padding.log",
    conda:
        ENVIRONMENT
    threads: CAPTURE_THREADS
    params:
        decides=DECIDES,
        seed=settings.seed,
    script:
        "../scripts/measure_padding.py"


rule plot_padding:
    input:
        report=f"{RESULTS}/padding.json",
        table=f"{RESULTS}/padding.csv",
        norms=f"{RESULTS}/padding_norms.csv",
    output:
        report(
            f"{RESULTS}/padding.svg",
            caption="../report/padding.rst",
            category="7 Padding",
            labels={"result": "Error of padded prompts by number of pads (figure)"},
        ),
        f"{RESULTS}/padding.png",
    log:
        f"{LOGS}/plot_padding.log",
    conda:
        ENVIRONMENT
    script:
        "../scripts/plot_padding.py"
