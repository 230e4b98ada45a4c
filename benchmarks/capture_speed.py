"""Tokens per second of the whole capture against the bare forward pass of the trunk, on the same batches.

Goal: what casting, hashing, writing and fsync cost on top of the model. Method: one process, one loaded model; in
each round all cases run over the same shards, in an order that rotates; the first round warms up and is not
counted. The bare case is as deep as the capture, and is run twice: the second against the first shows what the
machine's noise alone does.

    python benchmarks/capture_speed.py --config config/config.yaml --shards 2 --rounds 5 --out capture_speed.csv

Needs the model and the corpus of the configuration (`snakemake --cores 4 corpus`).
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import yaml

from anchorage.capture import capture_shards
from anchorage.capturer import Capturer
from anchorage.model import load_trunk
from anchorage.plan import Plan, load_plan
from anchorage.settings import load_settings
from anchorage.store.staging import Staging
from anchorage.trunk import trimmed

CASES = ("bare", "capture", "bare again")


def run_bare(plan: Plan, capturer: Capturer, shards: range) -> None:
    """Forward passes alone, nothing kept."""
    with torch.no_grad(), trimmed(capturer.trunk, max(site.depth for site in capturer.sites)):
        for shard in shards:
            for batch in plan.layout.batches(plan.layout.shard_rows_range(shard)):
                ids = torch.from_numpy(plan.corpus.rows(batch.start, batch.stop).astype(np.int64)).to(capturer.device)
                capturer.trunk.module(input_ids=ids, use_cache=False)
    if capturer.device.startswith("cuda"):
        torch.cuda.synchronize()


def run_capture(plan: Plan, capturer: Capturer, shards: range, folder: Path) -> None:
    """The capture itself: forward passes, casts, digests, durable shards, journal, memory log."""
    staging = Staging(folder, plan.key, layout=plan.layout, part=0, log=lambda line: None)
    try:
        capture_shards(plan, staging, shards=shards, capturer=capturer, log=lambda line: None)
    finally:
        staging.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("config/config.yaml"))
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("capture_speed.csv"))
    arguments = parser.parse_args()
    settings = load_settings(yaml.safe_load(arguments.config.read_text()))
    plan = load_plan(settings, settings.results / "model.json", settings.results / "corpus/tokens.safetensors")
    capturer = Capturer(load_trunk(plan.facts, settings.model), plan.sites, plan.facts["device"])
    shards = range(min(arguments.shards, plan.layout.n_shards))
    n_tokens = sum(len(plan.layout.shard_rows_range(shard)) for shard in shards) * plan.corpus.seq_len
    folder = settings.results / "benchmark-staging"
    rows = []
    for number in range(arguments.rounds + 1):
        for case in [CASES[(number + place) % len(CASES)] for place in range(len(CASES))]:
            shutil.rmtree(folder, ignore_errors=True)
            started = time.perf_counter()
            if case == "capture":
                run_capture(plan, capturer, shards, folder)
            else:
                run_bare(plan, capturer, shards)
            seconds = time.perf_counter() - started
            if number:
                rows.append({"round": number, "case": case, "tokens": n_tokens, "seconds": round(seconds, 4)})
            print(f"round {number} {case}: {n_tokens / seconds:.0f} tokens/s", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    with open(arguments.out, "w", newline="") as file:
        writer = csv.DictWriter(file, ["round", "case", "tokens", "seconds"])
        writer.writeheader()
        writer.writerows(rows)
    seconds_of = {case: [row["seconds"] for row in rows if row["case"] == case] for case in CASES}
    for case in CASES[1:]:
        ratios = [bare / other for bare, other in zip(seconds_of["bare"], seconds_of[case], strict=True)]
        print(
            f"{case} / bare in tokens/s: median {statistics.median(ratios):.3f}, {min(ratios):.3f}-{max(ratios):.3f}; "
            f"of the medians {statistics.median(seconds_of['bare']) / statistics.median(seconds_of[case]):.3f}"
        )


if __name__ == "__main__":
    main()
