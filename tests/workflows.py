"""Run the real workflow in a folder of its own, kill it, look at what it left."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tiny_models import save_tiny

ROOT = Path(__file__).parents[1]
WORDS = ["the", "of", "anchor", "ship", "sea", "harbour", "chain", "water", "stone", "rope", "keeps", "wind", "tide"]


def write_corpus(path: Path, n_texts: int = 60, seed: int = 3) -> None:
    """JSON lines of pseudo-random sentences, some of them too short to be used."""
    draw = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [" ".join(draw.choices(WORDS, k=draw.choice([1, 20, 60]))) for _ in range(n_texts)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_uneven(path: Path, n_texts: int, seed: int = 5) -> list[str]:
    """JSON lines of texts from 1 to 64 words, most of them short; returns them."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=int(2 ** draw.uniform(0, 6)))) for _ in range(n_texts)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


class Workflow:
    """A copy of the workflow with a tiny model and corpus, and a configuration to be changed."""

    def __init__(self, root: Path, *, kind: str = "llama") -> None:
        self.root = root
        for name in ("Snakefile", "workflow", "config", "profiles"):
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, root / name)
        self.config: dict[str, Any] = yaml.safe_load((ROOT / "config/test.yaml").read_text())
        model = root / "resources/models" / f"tiny-{kind}"
        model.parent.mkdir(parents=True)
        save_tiny(model, kind)
        self.config["model"]["source"] = str(model.relative_to(root))
        write_corpus(root / "resources/corpora/tiny.jsonl")

    def copy(self, root: Path) -> Workflow:
        """The same, with results and all, in another folder; hard links stay links."""
        subprocess.run(["cp", "-a", f"{self.root}/.", root], check=True)
        return self.at(root)

    def at(self, root: Path) -> Workflow:
        """The same, of which a copy lies in another folder."""
        other = object.__new__(Workflow)
        other.root, other.config = root, json.loads(json.dumps(self.config))
        return other

    @property
    def results(self) -> Path:
        return self.root / "results" / self.config["run"]

    def command(self, *arguments: str) -> list[str]:
        (self.root / "run.yaml").write_text(yaml.safe_dump(self.config))
        return [sys.executable, "-m", "snakemake", "--cores", "4", "--configfile", "run.yaml", *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the plain command in a process group of its own."""
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "COLUMNS": "200"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # many processes import the same few modules
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.root,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, *arguments: str, ok: bool = True) -> str:
        """Run the plain command to its end; returns what it printed."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=300)
        assert (process.returncode == 0) is ok, output
        return output

    def log(self, name: str) -> str:
        return (self.results / "logs" / f"{name}.log").read_text()

    def report(self, name: str) -> Any:
        return json.loads((self.results / f"{name}.json").read_text())

    def manifest(self) -> bytes:
        return (self.results / "cache/manifest.jsonl").read_bytes()

    def shards(self) -> dict[str, bytes]:
        """Every published shard's bytes by name."""
        cache = self.results / "cache"
        return {str(path.relative_to(cache)): path.read_bytes() for path in sorted(cache.rglob("*.safetensors"))}

    def captured_since(self, moment: float) -> int:
        """Shards captured by jobs that began after a moment, as their logs say."""
        logs = (self.results / "logs").glob("capture_part_*.log")
        texts = [path.read_text() for path in logs if path.stat().st_mtime > moment]
        return sum(int(number) for text in texts for number in re.findall(r"captured (\d+) shards", text))

    def journal_lines(self) -> int:
        """Lines of all journals: shards made durable so far."""
        return sum(path.read_bytes().count(b"\n") for path in self.results.glob("staging/*/journal-*.jsonl"))


def kill_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 120) -> bool:
    """Wait for a condition while a process runs; says whether it came true before the process ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        if process.poll() is not None:
            return condition()
        time.sleep(0.002)
    raise TimeoutError
