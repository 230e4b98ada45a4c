# Needs model.json (for the tokenizer) and the text. Makes the token rows.
# Guarantees: tokenised once; as many rows as asked, each with its origin.


rule build_corpus:
    input:
        model=MODEL_FACTS,
        text=local_inputs(settings.corpus.source),
    output:
        tokens=TOKENS,
        facts=CORPUS_FACTS,
    log:
        f"{LOGS}/build_corpus.log",
    conda:
        ENVIRONMENT
    params:
        corpus=settings.corpus.model_dump(),
    script:
        "../scripts/build_corpus.py"
