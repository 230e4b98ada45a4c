"""Made-up tables of the loading lab, as its rules write them: times and memory of a machine on which every claim of the
lesson holds. Tests change what they need otherwise."""

from __future__ import annotations

from typing import Any

import pandas as pd

COLUMNS = [
    "key", "subject", "method", "state", "use", "repeat", "position", "status", "reason", "load_s", "first_forward_s",
    "touch_s", "total_s", "wait_s", "file_bytes", "touched_bytes", "gb_s", "bytes_from_disk", "resident_before",
    "resident_loaded", "resident_after", "residency_by", "cold_kind", "peak_mib", "base_mib", "anonymous_mib",
    "file_mib", "major_faults", "minor_faults", "filesystem", "kernel",
]  # fmt: skip
MIB = 2**20
DEFAULT = ["torch.load", "torch.load-mmap", "load_file", "one-tensor", "ours"]
ALL = [
    "torch.load", "torch.load-mmap", "load_file", "load_file-pread", "one-tensor", "safe_open", "readinto",
    "preadv-threads", "mmap-willneed", "mmap-sequential", "mmap-random", "fastsafetensors", "runai-streamer", "ours",
]  # fmt: skip
COPYING = {"ours", "torch.load", "load_file-pread", "readinto", "preadv-threads", "fastsafetensors", "runai-streamer"}
FILES = {"weights": (512, 512), "big": (256, 256), "shard": (192, 12)}  # MiB of the file, of what is wanted


def measurement(subject: str, method: str, state: str, repeat: int) -> dict[str, Any]:
    """A measurement: copying takes 2 s a GiB cold and 1 s warm, all of it loading; mapping 4 s and 0.25 s, all of it
    touching. A repeat is 1 % slower than the one before."""
    file, wanted = FILES[subject]
    copies = method in COPYING
    touched = wanted / 64 if method == "one-tensor" and subject != "shard" else wanted
    read = file if method == "mmap-willneed" or (copies and method != "ours") else touched
    per_gib = {"cold": 2.0 if copies else 4.0, "warm": 1.0 if copies else 0.25}[state] * (1 + 0.01 * repeat)
    whole_s = per_gib * read / 1024
    load_s = whole_s if copies else 0.001
    total_s = load_s + (0.0 if copies else whole_s)
    return {
        "subject": subject, "method": method, "state": state, "use": "touch", "repeat": repeat, "position": repeat,
        "status": "measured", "load_s": load_s, "touch_s": total_s - load_s, "total_s": total_s,
        "wait_s": 0.01 * total_s,
        "file_bytes": file * MIB, "touched_bytes": touched * MIB, "gb_s": touched * MIB / 1e9 / total_s,
        "bytes_from_disk": read * MIB if state == "cold" else 0, "resident_before": 0.0 if state == "cold" else 1.0,
        "resident_loaded": 1.0 if copies or state == "warm" else 0.02,
        "resident_after": 1.0, "residency_by": "cachestat", "cold_kind": "guest-cold" if state == "cold" else None,
        "base_mib": 200.0, "peak_mib": 200.0 + read, "anonymous_mib": read if copies else 1.0,
        "file_mib": 0.0 if copies else touched, "major_faults": 0, "minor_faults": 9, "filesystem": "ext4",
        "kernel": "6.18",
    }  # fmt: skip


FORWARD_S = 3.0


def forward_pass(subject: str, method: str, state: str, repeat: int) -> dict[str, Any]:
    """A measurement in which the model ran, for :data:`FORWARD_S`, and its activations took 100 MiB."""
    line = measurement(subject, method, state, repeat)
    total_s = line["load_s"] + FORWARD_S
    more = {name: line[name] + 100.0 for name in ("peak_mib", "anonymous_mib")}
    return line | more | {"use": "forward", "first_forward_s": FORWARD_S, "total_s": total_s, "wait_s": 0.02 * total_s}


def loading_table(methods: list[str] = DEFAULT, *, repeats: int = 3, key: str = "k") -> pd.DataFrame:
    """Every subject and method, cold and warm; of whole weights with a model that runs, too."""
    rows = [
        make(subject, method, state, repeat)
        for subject in FILES
        for method in methods
        for make in ([measurement, forward_pass] if subject == "weights" and method != "one-tensor" else [measurement])
        for state in ("cold", "warm")
        for repeat in range(repeats)
    ]
    return pd.DataFrame(rows, columns=COLUMNS).assign(key=key)


def not_run(table: pd.DataFrame, reason: str, **where: str) -> pd.DataFrame:
    """The table with one line "not run" instead of those that match."""
    match = pd.Series(True, index=table.index)
    for column, value in where.items():
        match &= table[column] == value
    lines = table[match].drop_duplicates(["subject", "method"])[["key", "subject", "method"]]
    lines = lines.assign(state=where.get("state"), status="not run", reason=reason)
    return pd.concat([table[~match], lines], ignore_index=True)[COLUMNS]


def side_tables(key: str = "k") -> dict[str, pd.DataFrame]:
    """The other tables: mapping workers share, pressure kills the copy, what claims to be cold is caught, liars are
    refused; no GPU."""
    workers = [
        {"subject": "weights", "method": method, "n_workers": n, "status": "measured", "base_pss_mib": 100.0 + n}
        | {"pss_mib": 100.0 + n + 512 * (n if method == "torch.load" else 1), "reason": None}
        for method in ("torch.load", "torch.load-mmap", "load_file")
        for n in (1, 2, 3, 4)
    ]
    limits = {"subject": "big", "base_mib": 10.0, "file_bytes": 256 * MIB, "swap_mib": 0.0}
    read = {"status": "measured", "first_bytes_from_disk": 256 * MIB}
    pressure = [
        {"method": "load_file", "limit_of": "none", "limit_mib": None, "second_bytes_from_disk": 0} | read | limits,
        {"method": "load_file", "limit_of": "60% of the file", "limit_mib": 160.0, "second_bytes_from_disk": 200 * MIB}
        | read | limits,
        {"method": "torch.load", "limit_of": "60% of the file", "limit_mib": 160.0, "status": "killed"} | limits,
        {"method": "torch.load", "limit_of": "150% of the file", "limit_mib": 400.0, "second_bytes_from_disk": 0}
        | read | limits,
    ]  # fmt: skip
    device = [{"subject": "weights", "way": "load_file, to", "status": "not run", "reason": "no CUDA device"}]
    dropped = {"resident_before": 0.0, "bytes_from_disk": 8 * MIB, "verdict": "cold, proved", "total_s": 0.04}
    found = {"resident_before": 1.0, "bytes_from_disk": 0, "verdict": "refused: why", "total_s": 0.01}
    accident = [
        {
            "step": step,
            "what": what,
            "status": "measured",
            "claimed": "cold",
            "file_bytes": 8 * MIB,
            "of_cold_time": numbers["total_s"] / 0.04,
        }
        | numbers
        for step, what, numbers in (
            ("dropped", "a dropped file", dropped),
            ("again", "a second run", found),
            ("copied", "a plain copy", found),
        )
    ]
    refusals = [
        {"kind": "pickle", "what": "calls os.system", "reader": "torch.load", "refused": True, "side_effect": False,
         "expected_refused": True},
        {"kind": "pickle", "what": "calls os.system", "reader": "torch.load weights_only=False", "refused": False,
         "side_effect": True, "expected_refused": False},
        {"kind": "header", "what": "a gap", "reader": "ours", "refused": True, "side_effect": False,
         "expected_refused": True},
        {"kind": "header", "what": "a gap", "reader": "safe_open", "refused": True, "side_effect": False,
         "expected_refused": None},
    ]  # fmt: skip
    tables = {
        "accident": accident,
        "refusals": refusals,
        "workers": workers,
        "pressure": pressure,
        "device_copy": device,
    }
    return {name: pd.DataFrame({"reason": None} | row for row in rows).assign(key=key) for name, rows in tables.items()}
