"""Saved runs, in the form and the place of pytest-benchmark's own (`--benchmark-autosave`).

gate.py appends one for each commit it lets pass or stops, and history.py draws them all.
"""

from __future__ import annotations

import json
import platform
import statistics
from datetime import UTC, datetime
from pathlib import Path

from engine.machine import describe

FOLDER = Path(".benchmarks")  # pytest-benchmark's default, under the directory it is run in


def save(folder: Path, label: str, commit: str | None, benchmarks: list[dict]) -> Path:
    """Append a run to those in `folder`; returns its file."""
    implementation, (bits, _) = platform.python_implementation(), platform.architecture()
    version = ".".join(platform.python_version_tuple()[:2])
    place = folder / f"{platform.system()}-{implementation}-{version}-{bits}"
    place.mkdir(parents=True, exist_ok=True)
    numbers = [int(file.name[:4]) for file in place.glob("[0-9][0-9][0-9][0-9]_*.json")]
    file = place / f"{max(numbers, default=0) + 1:04}_{label}.json"
    run = {
        "machine_info": {"machine": platform.machine(), "cpu": {"brand_raw": describe()}},
        "commit_info": {"id": commit},
        "benchmarks": benchmarks,
        "datetime": datetime.now(UTC).isoformat(),
    }
    file.write_text(json.dumps(run, indent=4))
    return file


def benchmark(group: str, name: str, seconds: list[float], **extra_info) -> dict:
    """One benchmark of a run: what was timed, and how often."""
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    mean = statistics.mean(seconds)
    stats = {
        "min": min(seconds),
        "max": max(seconds),
        "mean": mean,
        "stddev": statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        "rounds": len(seconds),
        "median": statistics.median(seconds),
        "q1": quartiles[0],
        "q3": quartiles[2],
        "iqr": quartiles[2] - quartiles[0],
        "ops": 1 / mean,
        "total": sum(seconds),
        "iterations": 1,
        "outliers": "",
    }
    return {"group": group, "name": name, "fullname": name, "extra_info": extra_info} | {
        "params": None,
        "param": None,
        "options": {},
        "stats": stats,
    }


def load(folder: Path) -> list[dict]:
    """Every run below `folder`, the oldest first; ValueError names a file that is none."""
    found = []
    for file in folder.rglob("*.json"):
        try:
            run = json.loads(file.read_text(encoding="utf-8"))
            run["datetime"], run["benchmarks"]
        except (ValueError, TypeError, KeyError) as e:
            raise ValueError(f"{file}: is no saved run ({e!r})") from None
        found.append(run)
    return sorted(found, key=lambda run: datetime.fromisoformat(run["datetime"]))
