# Needs model.json and the token rows. Makes the cache: shards, a list of them a part, the manifest.
# Guarantees: shards durable in staging one after the other; published only when their part is whole; nothing taken for
# done that another key made. Parts with the same pattern of files share a rule: capture_part, capture_tail_part, ...

for part_rule in PART_RULES:

    rule:
        name:
            part_rule.name
        input:
            model=MODEL_FACTS,
            tokens=TOKENS,
        output:
            shards=[
                f"{CACHE}/{published_shard(tier, '{p}', index)}"
                for tier, n_shards in part_rule.n_shards.items()
                for index in range(n_shards)
            ],
            part=f"{CACHE}/{published_part('{p}')}",
        log:
            f"{LOGS}/capture_part_{{p}}.log",
        wildcard_constraints:
            p="|".join(map(str, part_rule.parts)),
        conda:
            ENVIRONMENT
        threads: CAPTURE_THREADS
        params:
            decides=DECIDES,
            shards=lambda wildcards: list(layout.part_shards(int(wildcards.p))),
        script:
            "../scripts/capture_part.py"


rule gather_manifest:
    input:
        PART_LISTS,
    output:
        f"{CACHE}/{MANIFEST}",
    log:
        f"{LOGS}/gather_manifest.log",
    conda:
        ENVIRONMENT
    params:
        decides=DECIDES,
    script:
        "../scripts/gather_manifest.py"


# Removes the staged shards of earlier configurations of this run: `make prune`.
rule prune:
    input:
        MODEL_FACTS,
    log:
        f"{LOGS}/prune.log",
    conda:
        ENVIRONMENT
    script:
        "../scripts/prune.py"


# What the run will take, from a few batches of it, against what the disk has: `make plan`.
rule forecast_run:
    input:
        model=MODEL_FACTS,
        tokens=TOKENS,
    output:
        PLAN_RESULTS,
    log:
        f"{LOGS}/forecast_run.log",
    conda:
        ENVIRONMENT
    threads: CAPTURE_THREADS
    params:
        decides=DECIDES,
    script:
        "../scripts/forecast_run.py"
