"""Qwen3 language models on an ordinary CPU.

>>> from engine import LLM, SamplingParams
>>> llm = LLM()  # the built-in model
>>> llm.generate("To be, or not", SamplingParams(max_tokens=16, temperature=0)).text
"""

from engine.generate import Completion
from engine.llm import LLM
from engine.sampler import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams"]
