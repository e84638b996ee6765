"""Qwen3 language models on an ordinary CPU.

>>> from engine import LLM, SamplingParams
>>> llm = LLM()  # the built-in model
>>> llm.generate("To be, or not", SamplingParams(max_tokens=16, temperature=0)).text
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.reply import Completion
    from engine.sampler import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams"]
PLACES = {"Completion": "generate", "LLM": "llm", "SamplingParams": "sampler"}


def __getattr__(name: str):
    """Import what is asked for when it is: Numba takes a while, and this package is imported
    before the command line can say what Ctrl-C does meanwhile."""
    if name not in PLACES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(f"engine.{PLACES[name]}"), name)
