"""Peak memory of a capture against the number of its shards, beside the loop that people write first.

Goal: the capture's peak does not grow with the run; the control's does. Method: each case in a fresh process, which
prints its own VmHWM at the end. The control is the tutorial's "all_acts" loop: every module cached, autograd on, all
kept until the end.

    python benchmarks/capture_memory.py --rows 512 1024 2048 4096 --out capture_memory.csv

The model is a random one of Llama's form, small enough for the control.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the builder of tiny models


def run_case(case: str, folder: Path, n_rows: int) -> None:
    """In a process of its own: run, then print the peak."""
    import numpy as np
    import torch
    from nnsight import NNsight

    from anchorage.memory import measure_memory
    from anchorage.model import load_trunk
    from plans import build_plan, capture

    plan = build_plan(folder, corpus={"rows": n_rows}, capture={"shard_rows": 128, "batch_rows": 16, "parts": 1})
    torch.set_num_threads(1)
    if case == "capture":
        capture(plan, folder / f"cache-{n_rows}")
    else:
        model, all_acts = NNsight(load_trunk(plan.facts, plan.settings.model).module.requires_grad_(True)), []
        for start in range(0, n_rows, 16):
            ids = torch.from_numpy(plan.corpus.rows(start, start + 16).astype(np.int64))
            with model.trace(input_ids=ids, use_cache=False) as tracer:
                cache = tracer.cache()
            all_acts.append({key: cache[key].output for key in cache.keys()})  # noqa: SIM118 (not a mapping)
    print(json.dumps(measure_memory("cpu")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--out", type=Path, default=Path("capture_memory.csv"))
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        run_case(arguments.case[0], Path(arguments.case[1]), int(arguments.case[2]))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        build_inputs(Path(folder), max(arguments.rows))
        for n_rows in arguments.rows:
            for case in ("capture", "all_acts"):
                command = [sys.executable, __file__, "--case", case, folder, str(n_rows)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                memory = json.loads(done.stdout.splitlines()[-1])
                rows.append({"case": case, "rows": n_rows, "shards": n_rows // 128, "peak_mib": memory["peak_mib"]})
                print(rows[-1], flush=True)
    with open(arguments.out, "w", newline="") as file:
        writer = csv.DictWriter(file, ["case", "rows", "shards", "peak_mib"])
        writer.writeheader()
        writer.writerows(rows)


def build_inputs(folder: Path, n_rows: int) -> None:
    """A model wide enough to be seen in the peaks, and text enough for the longest run."""
    from tiny_models import save_tiny
    from workflows import write_corpus

    save_tiny(folder / "model", "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    write_corpus(folder / "text.jsonl", n_texts=n_rows)


if __name__ == "__main__":
    main()
