"""Text -> packed token rows, and corpus.json."""

import json
from pathlib import Path

from anchorage.corpus import build_corpus
from anchorage.durable import write_json
from anchorage.job import start_job
from anchorage.model import load_tokenizer

job = start_job(snakemake)
model = json.loads(Path(snakemake.input.model).read_text())
facts = build_corpus(
    job.settings.corpus,
    load_tokenizer(model),
    tokens_path=Path(snakemake.output.tokens),
    vocab_size=model["architecture"]["vocab_size"],
    log=job.log,
)
write_json(Path(snakemake.output.facts), facts | {"tokenizer_digest": model["tokenizer_digest"]})
