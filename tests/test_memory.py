"""What loading and running hold in memory, told by the operating system."""

import subprocess
import sys

import numpy as np
import pytest
from checkpoints import write_checkpoint

resource = pytest.importorskip("resource", reason="only POSIX tells a process's peak memory")

SCRIPT = """
import resource, sys
import numpy as np
from engine import LLM, SamplingParams

def peak():  # bytes; Linux counts kilobytes, macOS bytes
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

LLM(weights=sys.argv[2]).generate("O", SamplingParams(max_tokens=2))  # the libraries, the kernels
before = peak()
llm = LLM(sys.argv[1], weights=sys.argv[2])
loaded = peak()
llm.generate(np.arange(2000) % 100, SamplingParams(max_tokens=2))
print(llm._model.bytes_per_token(0), loaded - before, peak() - loaded)
"""


@pytest.mark.parametrize(("weights", "at_load"), [("f32", 1.3), ("q8_0", 1.8)])
def test_loading_never_holds_the_checkpoint_twice(weights, at_load, tmp_path):
    """A whole tensor widened or mapped at once doubles what a machine needs to open a model.

    The pieces that are mapped at a time are a part of what is small here, and none of a real model.
    """
    path = write_checkpoint(
        tmp_path,
        hidden_size=512,
        intermediate_size=512,
        vocab_size=60_000,
        eos_token_id=1,
        max_position_embeddings=4096,
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), weights], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kept, loading, running = np.array(done.stdout.split(), float)
    assert loading < at_load * kept, (loading / 1e6, kept / 1e6)
    # 2,000 tokens: rows of K and V, scratch for a chunk, and one row of logits, not 2,000 (480 MB)
    assert running < 60e6, running / 1e6
