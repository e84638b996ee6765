"""How a model's makers would sample: what its generation_config.json says."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from engine.config import read_json
from engine.sampler import SamplingParams

DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_params(path: Path) -> SamplingParams:
    """How the model's makers would sample: generation_config.json, where it says something."""
    file = path / "generation_config.json"
    raw = read_json(file) if os.path.exists(file) else {}
    known = {f.name for f in fields(SamplingParams)} & set(DEFAULTS)
    try:
        return SamplingParams(**{k: raw[k] for k in known if raw.get(k) is not None})
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
