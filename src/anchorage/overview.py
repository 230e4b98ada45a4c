"""The first page of the report: what was found, and what it was made from, as reStructuredText.

Snakemake renders its text as a Jinja template first and as reStructuredText then, so every value is escaped for both.
No dates: the same results give the same page.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from anchorage.forecast import hours_text
from anchorage.loading.summary import LoadingTable
from anchorage.loading.uses import headline
from anchorage.rst import bullets, image, plain, section, table
from anchorage.store.identity import check_key
from anchorage.store.manifest import Manifest, read_manifest

_ROLES = ".. role:: good\n.. role:: bad\n.. role:: digest\n"
_NO_VALUE = "\N{EN DASH}"

Row = Mapping[str, str]


@dataclass(frozen=True)
class _Results:
    """What the page tells of. ``sweep`` and ``controls`` are empty where the run has no probes, ``loading`` is None
    where it has no loading lab."""

    model: Mapping[str, Any]
    corpus: Mapping[str, Any]
    manifest: Manifest
    verify: Mapping[str, Any]
    anchor: Mapping[str, Any]
    leak: Mapping[str, Any]
    extrapolation: Mapping[str, Any]
    memory: Sequence[Row]
    outliers: Sequence[Row]
    sweep: Sequence[Row]
    controls: Mapping[str, Any]
    loading: LoadingTable | None


def describe_run(run: str, files: Mapping[str, Path]) -> str:
    """Write the report's first page.

    Args:
        run: name of the run.
        files: ``model``, ``corpus``, ``manifest``, ``verify``, ``anchor``, ``anchor_figure``, ``memory``, ``leak``,
            ``memory_figure``, ``extrapolation`` and ``outliers``; with probes also ``sweep``, ``controls`` and
            ``sweep_figure``, with the loading lab ``loading``.

    Returns:
        The text of ``overview.rst``.

    Raises:
        AnchorageError: a result belongs to another capture key than the manifest.
    """
    results = _read_results(files)
    title = plain(f"Anchorage: run {run}")
    sections = [f"{title}\n{'=' * len(title)}", _ROLES, _summary(results), _findings(results), _provenance(results)]
    sections += [_batch_sizes(files["anchor_figure"]), _memory_section(results.leak, files["memory_figure"])]
    if results.sweep:
        sections.append(_sweep(results.sweep, files["sweep_figure"]))
    # A brace would begin an expression of the template; what that prints is not read as a template again.
    return "\n\n".join(sections).replace("{", "{{ '{' }}") + "\n"


def _read_results(files: Mapping[str, Path]) -> _Results:
    facts = {
        name: json.loads(files[name].read_text()) if name in files else {}
        for name in ("model", "corpus", "verify", "anchor", "leak", "extrapolation", "controls")
    }
    tables: dict[str, Any] = {
        name: _read_table(files[name]) if name in files else [] for name in ("memory", "outliers", "sweep")
    }
    manifest = read_manifest(files["manifest"])
    for name in ("verify", "anchor", "leak", "extrapolation", "controls"):
        if name in files:
            check_key(str(files[name]), facts[name]["key"], manifest.key)
    for name, lines in tables.items():
        for row in lines:
            check_key(str(files[name]), row["key"], manifest.key)
    loading = pd.read_csv(files["loading"]) if "loading" in files else None
    for key in [] if loading is None else loading["key"].unique():
        check_key(str(files["loading"]), key, manifest.key)
    return _Results(**facts, **tables, manifest=manifest, loading=None if loading is None else LoadingTable(loading))


def _read_table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _summary(results: _Results) -> str:
    corpus, architecture, exact = results.corpus, results.model["architecture"], results.anchor["exact"]
    return (
        f"{corpus['rows']:,} rows, {corpus['n_tokens']:,} tokens through {plain(architecture['class'])} "
        f"({architecture['n_layers']} layers, width {architecture['width']:,}); {exact['n_sites']} sites kept on disk, "
        f"{_size(results.verify['n_bytes'])} in {results.verify['n_shards']:,} shards. Every result has a caption "
        "that says how it was measured and what it does not show: choose it on the left."
    )


def _findings(results: _Results) -> str:
    verify, anchor = results.verify, results.anchor
    rows = [
        ["Anchoring", _verdict(anchor), _anchoring(anchor)],
        ["Memory", _leak_verdict(results.leak), f"{_memory(results.memory)} {_growth(results.leak)}"],
        ["Extrapolation", _NO_VALUE, _extrapolation(results.extrapolation)],
    ]
    if results.sweep:
        found = "; ".join(
            f"{plain(best['task'])} {_accuracy(best)} at {plain(best['site'])} (chance {float(best['chance']):.3f})"
            for best in map(_best, _tasks(results.sweep).values())
        )
        warned = dict.fromkeys(row["task"] for row in results.sweep if row["warning"])
        warning = f" Warned of (sweep.csv): {plain(', '.join(warned))}." if warned else ""
        rows.append(["Layer sweep", _NO_VALUE, f"Best accuracy on held-out rows: {found}.{warning}"])
    if results.controls:
        rows.append(["Probe controls", _verdict(results.controls), _controls(results.controls)])
    rows.append(["Outlier dimensions", _NO_VALUE, _outliers(results.outliers)])
    if results.loading:
        rows.append(["Loading", _NO_VALUE, plain(headline(results.loading))])
    kinds = ", ".join(f"{len(verify[kind]):,} {kind}" for kind in ("missing", "corrupt", "orphans"))
    looked = f"{verify['n_files']:,} files of {verify['n_bytes']:,} bytes, depth {plain(verify['depth'])}: {kinds}."
    rows.append(["Integrity", _verdict(verify), looked])
    faults = [fault for report in (anchor, results.leak, verify) for fault in report["faults"][:3]]
    return section("Findings", table(["Check", "Verdict", "What was found"], rows), bullets(faults))


def _anchoring(anchor: Mapping[str, Any]) -> str:
    exact = anchor["exact"]
    return (
        f"{exact['n_rows']:,} rows computed again at {exact['n_sites']} sites: {exact['n_comparisons']:,} comparisons, "
        f"{exact['mismatched']:,} mismatched; largest difference {plain(exact['max_abs_diff'])}. "
        f"Demanded: {plain(anchor['demanded'])}."
    )


def _memory(lines: Sequence[Row]) -> str:
    if not lines:
        return "No capture of a shard left a log."
    peak, speed = (
        max(float(line["peak_mib"]) for line in lines),
        median(float(line["tokens_per_s"]) for line in lines),
    )
    return f"Highest resident size {peak:,.0f} MiB in {len(lines):,} shards; median {speed:,.0f} tokens a second."


def _leak_verdict(leak: Mapping[str, Any]) -> str:
    if leak["leak"] is None:
        return _NO_VALUE
    return ":bad:`leak`" if leak["leak"] else ":good:`no leak`"


def _growth(leak: Mapping[str, Any]) -> str:
    share = leak["memory_log_share"]
    logging = "" if share is None else f" Reading and logging memory took {100 * share:.2f} % of the capture's time."
    return _sentence(leak["reason"]) + logging


def _sentence(text: str) -> str:
    return plain(f"{text[0].upper()}{text[1:]}.")


def _extrapolation(found: Mapping[str, Any]) -> str:
    time, n_bytes, longer = found["active_s"], found["bytes"], found["forecast"]
    error = "unknown" if time["relative_error"] is None else f"off by {100 * time['relative_error']:+.1f} %"
    return (
        f"Active time, predicted from the first {found['n_shards_used']} of {found['n_shards']} shards: {error}; "
        f"bytes: off by {100 * n_bytes['relative_error']:+.2f} %. {longer['rows']:,} rows would take "
        f"{hours_text(longer)} and {longer['gib']:,.1f} GiB, one layer only {longer['one_layer_gib']:,.1f} GiB."
    )


def _outliers(sites: Sequence[Row]) -> str:
    largest = max(sites, key=lambda row: float(row["max_abs"]))
    return (
        f"In {sum(int(row['n_outliers']) > 0 for row in sites)} of {len(sites)} sites; the largest value is "
        f"{float(largest['max_abs']):,.1f}, in dimension {plain(largest['max_dimension'])} of {plain(largest['site'])}."
    )


def _controls(controls: Mapping[str, Any]) -> str:
    tasks = controls["tasks"]
    warnings = [f"{task}: {warning}" for task, control in tasks.items() for warning in control["warnings"]]
    told = "; ".join(map(plain, [*controls["faults"][:3], *warnings] or ["no warnings"]))
    return f"{sum(control['matched'] for control in tasks.values())} of {len(tasks)} tasks matched; {told}."


def _provenance(results: _Results) -> str:
    model, corpus, identity = results.model, results.corpus, results.manifest.identity
    named = [corpus[name] for name in ("source", "name", "revision", "split") if corpus[name]]
    rows = [
        ["Model", plain(model["source"])],
        ["Commit", _digest(model["commit"]) if model["commit"] else "none: a local folder"],
        ["Weights digest", _digest(model["weights_digest"])],
        ["Tokenizer digest", _digest(model["tokenizer_digest"])],
        ["Corpus", plain(", ".join(named))],
        ["Text digest", _digest(corpus["text_digest"])],
        ["Capture key", _digest(results.manifest.key)],
        [
            "Forward pass",
            plain(f"{identity['dtype']}, {identity['attention']} attention, batches of {identity['batch_rows']} rows"),
        ],
        ["Stored as", plain(identity["storage_dtype"])],
        ["Device", "; ".join(map(plain, _devices(results)))],
        ["Versions", plain(", ".join(f"{name} {version}" for name, version in model["versions"].items()))],
    ]
    return section("Provenance", table(None, rows))


def _devices(results: _Results) -> list[str]:
    """Each machine that captured shards, in the order of the shards."""
    devices = []
    for shard in results.manifest.shards:
        seen = shard.environment
        threads = f"threads {seen['threads']}" if seen.get("threads") else None
        parts = (seen.get("device"), seen.get("device_name"), seen.get("cpu_capability"), seen.get("system"), threads)
        devices.append(", ".join(str(part) for part in parts if part))
    return list(dict.fromkeys(devices))


def _tasks(sweep: Sequence[Row]) -> dict[str, list[Row]]:
    """Lines of each task, its sites in running order."""
    ordered = sorted(sweep, key=lambda row: int(row["site_index"]))
    return {
        task: [row for row in ordered if row["task"] == task] for task in dict.fromkeys(row["task"] for row in sweep)
    }


def _best(sites: Sequence[Row]) -> Row:
    return max(sites, key=lambda row: float(row["accuracy"]))


def _sweep(sweep: Sequence[Row], figure: Path) -> str:
    tasks = _tasks(sweep)
    text = (
        "Accuracy on held-out rows at the task's best site (in brackets its interval), against the model's input, the "
        f"last site, probes trained on shuffled labels (lowest to highest of {len({row['site'] for row in sweep})} "
        "sites), chance, and the best lookup by position or by token id alone."
    )
    head = ["Task", "Best site", "Accuracy", "At embed", "Last site", "Shuffled labels", "Chance"]
    cells = table([*head, "Position only", "Token only"], [_task_cells(*task) for task in tasks.items()])
    return section("Layer sweep", text, cells, image(figure, "accuracy at each site"))


def _task_cells(task: str, sites: Sequence[Row]) -> list[str]:
    best, last = _best(sites), sites[-1]
    shuffled = [float(row["shuffled_accuracy"]) for row in sites]
    return [
        plain(task),
        plain(best["site"]),
        f"{_accuracy(best)} ({float(best['low']):.3f} to {float(best['high']):.3f})",
        next((_accuracy(row) for row in sites if row["site"] == "embed"), _NO_VALUE),
        f"{_accuracy(last)} ({plain(last['site'])})",
        f"{min(shuffled):.3f} to {max(shuffled):.3f}",
        *(f"{float(best[name]):.3f}" for name in ("chance", "position_only_accuracy", "token_only_accuracy")),
    ]


def _batch_sizes(figure: Path) -> str:
    text = (
        "Exact means: on this machine, at the captured batch size. The same rows in batches of other sizes may differ "
        "in the last bits, since kernels choose by shape."
    )
    return section("Batch sizes", text, image(figure, "rows that stay exact at each batch size"))


def _memory_section(leak: Mapping[str, Any], figure: Path) -> str:
    return section("Memory", _sentence(leak["reason"]), image(figure, "memory over the rows of the run"))


def _accuracy(row: Row) -> str:
    return f"{float(row['accuracy']):.3f}"


def _verdict(report: Mapping[str, Any]) -> str:
    return ":good:`passed`" if report["ok"] else ":bad:`failed`"


def _digest(value: object) -> str:
    return f":digest:`{plain(value)}`"


def _size(n_bytes: int) -> str:
    power = max((power for power in range(5) if n_bytes >= 1024**power), default=0)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{n_bytes / 1024**power:,.{min(power, 2)}f} {unit}"
