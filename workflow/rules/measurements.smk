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
    params:
        code=code_digest("figures.padding", "figures.style"),
    script:
        "../scripts/plot_padding.py"


rule measure_costs:
    input:
        model=MODEL_FACTS,
        tokens=TOKENS,
    output:
        f"{RESULTS}/costs/round-{{round}}.csv",
    log:
        f"{LOGS}/measure_costs_{{round}}.log",
    wildcard_constraints:
        round=r"\d+",
    conda:
        ENVIRONMENT
    # All cores: nothing else of the run may be at work beside a measurement.
    threads: workflow.cores
    params:
        decides=DECIDES,
    script:
        "../scripts/measure_costs.py"


rule tabulate_costs:
    input:
        model=MODEL_FACTS,
        rounds=COST_ROUNDS,
    output:
        table=report(
            f"{RESULTS}/costs.csv",
            caption="../report/costs.rst",
            category="6 Costs",
            labels={"result": "Time and memory of every case and round (CSV)"},
        ),
        sentences=report(
            f"{RESULTS}/costs.md",
            caption="../report/costs.rst",
            category="6 Costs",
            labels={"result": "What the table of costs shows (Markdown)"},
        ),
    log:
        f"{LOGS}/tabulate_costs.log",
    conda:
        ENVIRONMENT
    params:
        decides=DECIDES,
        code=code_digest("costs.rounds", "costs.sentences"),
    script:
        "../scripts/tabulate_costs.py"


rule plot_costs:
    input:
        f"{RESULTS}/costs.csv",
    output:
        report(
            f"{RESULTS}/costs.svg",
            caption="../report/costs.rst",
            category="6 Costs",
            labels={"result": "Time and peak memory of the cases compared (figure)"},
        ),
        f"{RESULTS}/costs.png",
    log:
        f"{LOGS}/plot_costs.log",
    conda:
        ENVIRONMENT
    params:
        code=code_digest("figures.costs", "figures.style"),
    script:
        "../scripts/plot_costs.py"
