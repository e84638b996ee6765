"""One engine, one prompt length, in a process of its own, which makes a request when it is told to.

compare.py and gate.py run this file by its path (`Process`), with the interpreter that has the
engine; so it needs nothing of this repository, nor of any other engine than the one it measures.

The process opens the checkpoint, warms up with one short request and prints a line of JSON on what
it runs. Then, for each line on stdin, it makes a request of fresh random ids and prints another:
`first` are the seconds to its first token; `steps`, those of each forward after it; `peak_bytes` is
the most memory that the process has held, with what it read of mapped files. OpenVINO and this
engine choose the likeliest token between two forwards; llama.cpp and transformers are given random
ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

GGUF, OPENVINO = ".q8_0.gguf", ".openvino"  # beside the checkpoint's directory, for the peers
WARM_UP = 64, 4  # tokens of the prompt at most, and new ones

Run = Callable[[list[int], int], tuple[float, list[float]]]  # (ids, new tokens) -> first, steps


def engine(args: argparse.Namespace) -> tuple[Run, dict]:
    """This engine: the one that Python finds as `engine`."""
    import engine

    llm = engine.LLM(args.checkpoint, threads=args.threads, **dict(args.set))

    def run(ids, new):
        params = engine.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        m = llm.generate(ids, params).metrics
        return m.time_to_first_token_ms / 1e3, [ms / 1e3 for ms in m.per_forward_ms[1:]]

    about = {
        "version": ", ".join(str(llm.settings[key]) for key in ("weights", "kv_cache")),
        "package": str(Path(engine.__file__).resolve().parent),
    }
    if hasattr(llm._model, "bytes_per_token"):  # the NumPy backend's has no such bound
        about["bytes_per_token"] = llm._model.bytes_per_token(args.prompt + args.new // 2)
    return run, about


def llama_cpp(args: argparse.Namespace) -> tuple[Run, dict]:
    """llama.cpp, as its Python package gives it: float16 keys and values."""
    import llama_cpp

    llm = llama_cpp.Llama(
        args.checkpoint + GGUF,
        n_ctx=args.prompt + args.new + 16,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        n_batch=512,
        verbose=False,
    )

    def run(ids, new):
        llm.reset()
        return timed(ids, new, llm.eval)

    return run, {"version": f"llama-cpp-python {llama_cpp.__version__}, Q8_0"}


def openvino(args: argparse.Namespace) -> tuple[Run, dict]:
    """OpenVINO GenAI as it comes: 8-bit keys and values."""
    import openvino
    import openvino_genai

    pipe = openvino_genai.LLMPipeline(
        args.checkpoint + OPENVINO,
        "CPU",
        INFERENCE_NUM_THREADS=args.threads,
        PERFORMANCE_HINT="LATENCY",
    )

    def run(ids, new):
        x = np.array([ids], np.int64)
        mask = openvino.Tensor(np.ones_like(x))
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(x), mask)
        done = pipe.generate(inputs, max_new_tokens=new, ignore_eos=True, do_sample=False)
        raw = done.perf_metrics.raw_metrics  # microseconds
        return raw.m_times_to_first_token[0] / 1e6, [t / 1e6 for t in raw.token_infer_durations[1:]]

    version = re.split(r"[-+]", openvino_genai.__version__)[0]
    return run, {"version": f"openvino-genai {version}"}


def transformers(args: argparse.Namespace) -> tuple[Run, dict]:
    """transformers on PyTorch, in bf16."""
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.checkpoint, dtype=torch.bfloat16, local_files_only=True
    ).eval()

    @torch.inference_mode()
    def run(ids, new):
        cache = transformers.DynamicCache()

        def forward(some):
            x = torch.tensor([some])
            model(input_ids=x, past_key_values=cache, use_cache=True, logits_to_keep=1)

        return timed(ids, new, forward)

    version = f"transformers {transformers.__version__}, torch {torch.__version__}, bf16"
    return run, {"version": version}


def timed(ids: list[int], new: int, forward: Callable) -> tuple[float, list[float]]:
    """Seconds of one forward of the prompt, and of each of a token alone."""
    times = [time.perf_counter()]
    for some in (ids, *([i] for i in np.resize(ids, new - 1).tolist())):
        forward(some)
        times.append(time.perf_counter())
    first, *steps = np.diff(times).tolist()
    return first, steps


ENGINES = {
    "engine": engine,
    "llama.cpp": llama_cpp,
    "openvino": openvino,
    "transformers": transformers,
}


def peak_bytes() -> int:
    """The most memory that this process held.

    Not ru_maxrss where the kernel tells it otherwise: a process that was forked inherits there what
    its parent held.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) << 10
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size << 10


def option(text: str) -> tuple[str, object]:
    """NAME=VALUE; a value that is JSON is what it says, another is text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def at_least(least: int) -> Callable[[str], int]:
    """A type of argparse: whole numbers from `least` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is too few; {least} at least")
        return int(text)

    return number


def parser() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("engine", choices=list(ENGINES))
    ap.add_argument("checkpoint")
    ap.add_argument("--prompt", type=at_least(1), required=True, help="tokens")
    ap.add_argument("--new", type=at_least(2), required=True, help="tokens after it")
    ap.add_argument("--threads", type=int, required=True)
    ap.add_argument("--seed", type=int, default=0, help="of the ids")
    ap.add_argument("--set", type=option, action="append", default=[], metavar="NAME=VALUE")
    return ap


class Process:
    """An engine in a process of its own, run by the interpreter `python`; a context manager.

    RuntimeError has the end of what the process says on stderr, wherever it fails.
    """

    def __init__(self, python: str | os.PathLike, name: str, checkpoint, *flags, **environment):
        command = [python, __file__, name, checkpoint, *flags]
        # Safe path: the names of files beside this one must not hide those of packages.
        env = os.environ | {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"} | environment
        self._name, self._errors = name, tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            list(map(str, command)),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> Process:
        try:
            self.about: dict = self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def request(self) -> dict:
        """One request: `first`, `steps` and `peak_bytes`."""
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        for line in self._process.stdout:
            if line.startswith("{"):  # engines print lines of their own
                return json.loads(line)
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"{self._name} ended with status {status}: " + "\n".join(said[-5:]))


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    rng = np.random.default_rng(args.seed)
    vocab_size = json.loads((Path(args.checkpoint) / "config.json").read_text())["vocab_size"]

    def ids(n: int) -> list[int]:
        return rng.integers(0, vocab_size, n).tolist()

    run, about = ENGINES[args.engine](args)
    most, new = WARM_UP
    run(ids(min(args.prompt, most)), new)
    print(json.dumps(about), flush=True)
    for _ in sys.stdin:
        first, steps = run(ids(args.prompt), args.new)
        found = {"first": first, "steps": steps, "peak_bytes": peak_bytes()}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
