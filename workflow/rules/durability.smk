# Needs no run: it judges the code that saves, and the disk that the results lie on. Makes results/durability/: what crashes
# leave of a save, by recipe and filesystem, of our own writers too; what forcing bytes to the disk costs.
# Guarantees: what cannot be run here says so and why; an unsafe recipe that is found good fails the lab.


rule measure_fsync_cost:
    output:
        table=report(
            f"{LAB}/fsync_cost.csv",
            caption="../report/durability.rst",
            category="10 Durability",
            labels={"result": "What forcing bytes to the disk costs (CSV)"},
        ),
        disk=f"{LAB}/fsync_cost.json",
    log:
        f"{LAB}/logs/measure_fsync_cost.log",
    conda:
        ENVIRONMENT
    threads: workflow.cores
    resources:
        slots=ALL_SLOTS,
    params:
        profile=settings.durability.profile,
        seed=settings.seed,
        code=code_digest("durability.fsynccost", "durability.profiles"),
    script:
        "../scripts/measure_fsync_cost.py"


rule trace_syscalls:
    output:
        report(
            f"{LAB}/syscalls.csv",
            caption="../report/durability.rst",
            category="10 Durability",
            labels={"result": "The order of the system calls of each save (CSV)"},
        ),
    log:
        f"{LAB}/logs/trace_syscalls.log",
    conda:
        ENVIRONMENT
    threads: ONE_THREAD
    params:
        code=[
            JUDGED_CODE,
            code_digest(
                "durability.tracing", "durability.order", "durability.syscalls"
            ),
        ],
    script:
        "../scripts/trace_syscalls.py"


rule kill_saves:
    output:
        report(
            f"{LAB}/kill_points.csv",
            caption="../report/durability.rst",
            category="10 Durability",
            labels={"result": "Every kill of a save (CSV)"},
        ),
    log:
        f"{LAB}/logs/kill_saves.log",
    conda:
        ENVIRONMENT
    threads: workflow.cores
    params:
        profile=settings.durability.profile,
        code=[JUDGED_CODE, code_digest("durability.kills", "durability.ptrace")],
    script:
        "../scripts/kill_saves.py"


rule inject_faults:
    output:
        report(
            f"{LAB}/faults.csv",
            caption="../report/durability.rst",
            category="10 Durability",
            labels={"result": "An error in each call of a save (CSV)"},
        ),
    log:
        f"{LAB}/logs/inject_faults.log",
    conda:
        ENVIRONMENT
    threads: ONE_THREAD
    params:
        profile=settings.durability.profile,
        code=[
            JUDGED_CODE,
            code_digest(
                "durability.faults",
                "durability.attempt",
                "durability.mounts",
                "durability.syscalls",
            ),
        ],
    script:
        "../scripts/inject_faults.py"


rule enumerate_states:
    output:
        report(
            f"{LAB}/legal_states.csv",
            caption="../report/durability.rst",
            category="10 Durability",
            labels={"result": "States that POSIX allows after a crash (CSV)"},
        ),
    log:
        f"{LAB}/logs/enumerate_states.log",
    conda:
        ENVIRONMENT
    threads: ONE_THREAD
    params:
        code=[JUDGED_CODE, code_digest("durability.legal", "durability.operations")],
    script:
        "../scripts/enumerate_states.py"


rule cut_power:
    output:
        f"{LAB}/power_cuts/{{filesystem}}.csv",
    log:
        f"{LAB}/logs/cut_power_{{filesystem}}.log",
    wildcard_constraints:
        filesystem="|".join(FILESYSTEMS),
    conda:
        ENVIRONMENT
    threads: ONE_THREAD
    params:
        profile=settings.durability.profile,
        seed=settings.seed,
        code=[JUDGED_CODE, CUT_CODE],
    script:
        "../scripts/cut_power.py"


rule tabulate_power_cuts:
    input:
        CUT_TABLES,
    output:
        report(
            f"{LAB}/power_cuts.csv",
            caption="../report/durability.rst",
            category="10 Durability",
            labels={"result": "Power cuts by recipe, filesystem and schedule (CSV)"},
        ),
    log:
        f"{LAB}/logs/tabulate_power_cuts.log",
    conda:
        ENVIRONMENT
    params:
        code=code_digest("durability.powercut"),
    script:
        "../scripts/tabulate_power_cuts.py"


rule cut_workflow:
    input:
        WHOLE_RUN_INPUTS,
    output:
        report(
            f"{LAB}/workflow_cuts.csv",
            caption="../report/durability.rst",
            category="10 Durability",
            labels={"result": "Power cuts of a whole run (CSV)"},
        ),
    log:
        f"{LAB}/logs/cut_workflow.log",
    conda:
        ENVIRONMENT
    threads: ONE_THREAD
    params:
        profile=settings.durability.profile,
        seed=settings.seed,
        root=workflow.basedir,
        code=[
            JUDGED_CODE,
            CUT_CODE,
            code_digest(
                "durability.command", "durability.workflowcut", "durability.smallrun"
            ),
        ],
    script:
        "../scripts/cut_workflow.py"


rule model_flash:
    output:
        report(
            f"{LAB}/flash.csv",
            caption="../report/flash.rst",
            category="10 Durability",
            labels={"result": "What a drive does with writes: a model (CSV)"},
        ),
    log:
        f"{LAB}/logs/model_flash.log",
    conda:
        ENVIRONMENT
    threads: ONE_THREAD
    params:
        profile=settings.durability.profile,
        seed=settings.seed,
        code=code_digest("durability.flash"),
    script:
        "../scripts/model_flash.py"


rule plot_flash:
    input:
        f"{LAB}/flash.csv",
    output:
        report(
            f"{LAB}/flash.svg",
            caption="../report/flash.rst",
            category="10 Durability",
            labels={"result": "Write amplification by how full the drive is (figure)"},
        ),
        f"{LAB}/flash.png",
    log:
        f"{LAB}/logs/plot_flash.log",
    conda:
        ENVIRONMENT
    params:
        code=code_digest("figures.flash", "figures.style"),
    script:
        "../scripts/plot_flash.py"


rule judge_durability:
    input:
        **{name: f"{LAB}/{name}.csv" for name in LAB_TABLES},
    output:
        f"{LAB}/durability.json",
    log:
        f"{LAB}/logs/judge_durability.log",
    conda:
        ENVIRONMENT
    params:
        key=JUDGED_CODE,
        code=code_digest("durability.verdict"),
    script:
        "../scripts/judge_durability.py"


use rule gate as gate_durability with:
    input:
        report=f"{LAB}/durability.json",
    output:
        f"{LAB}/gates/durability.ok",
    log:
        f"{LAB}/logs/gate_durability.log",
    params:
        manifest="",


rule describe_durability:
    input:
        **{name: f"{LAB}/{name}.csv" for name in LAB_TABLES},
        verdict=f"{LAB}/durability.json",
        disk=f"{LAB}/fsync_cost.json",
    output:
        report(
            f"{LAB}/durability.md",
            caption="../report/durability.rst",
            category="10 Durability",
            labels={"result": "Which recipe survives which crash (Markdown)"},
        ),
        report(
            f"{LAB}/durability.svg",
            caption="../report/durability.rst",
            category="10 Durability",
            labels={
                "result": "Where bytes wait, and which recipe survives what (figure)"
            },
        ),
        f"{LAB}/durability.png",
    log:
        f"{LAB}/logs/describe_durability.log",
    conda:
        ENVIRONMENT
    params:
        code=code_digest("durability.findings", "figures.durability", "figures.style"),
    script:
        "../scripts/describe_durability.py"
