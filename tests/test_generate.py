"""engine/generate.py: the decode loop, with a model that says what a script tells it to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import engine
from engine.cache import BasicKvCache
from engine.decoding import Decoding
from engine.generate import Generation
from engine.metrics import Metrics
from engine.reply import Reply
from engine.sampler import SamplingParams
from engine.session import Session
from engine.thinking import ThinkingSplitter
from engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_dir(Path(engine.__file__).parent / "assets")
EMOJI = TOKENIZER.encode("😸")
EOS = frozenset({3, 5})
TENTH = 0.1  # seconds that a forward takes


class ScriptedModel:
    """Its n-th logits are largest at the n-th id of `script`; an exception there is raised.

    `calls` holds what each forward was given: (ids, is_prompt, rows of logits).
    """

    max_tokens = 8

    def __init__(self, *script: int | BaseException, vocab_size: int = 2176):
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.calls: list[tuple[list[int], bool, int]] = []
        self.time = 0.0
        self._script = iter(script)

    def new_logits(self, n: int) -> np.ndarray:
        return np.full((n, (self.config.vocab_size + 15) // 16 * 16), 7.0, np.float32)

    def forward(self, runs, logits, profile=None) -> None:
        ((ids, cache, is_prompt, n_logits),) = runs
        assert isinstance(ids, np.ndarray) and ids.ndim == 1 and n_logits == len(logits)
        self.calls.append((ids.tolist(), is_prompt, len(logits)))
        self.time += TENTH
        cache.reserve(len(ids))
        if len(logits):
            said = next(self._script)
            if isinstance(said, BaseException):
                raise said
            logits[:, : self.config.vocab_size] = 0
            logits[-1, said] = 1
        cache.commit(len(ids))

    @property
    def fed(self) -> list[int]:
        return [i for ids, _, _ in self.calls for i in ids]


def generation(
    model: ScriptedModel,
    prompt=(1,),
    context=1000,
    eos_ids=EOS,
    stream=True,
    splitter=None,
    **params,
) -> Generation:
    session = Session(BasicKvCache(n_layers=2, kv_dim=16), list(prompt), len(prompt))
    asked = SamplingParams(**{"temperature": 0, "max_tokens": None, **params})
    room = context - len(prompt)
    limit = room if asked.max_tokens is None else min(room, asked.max_tokens)
    metrics = Metrics(lambda: model.time)
    decoding = Decoding(model.config.vocab_size, session, asked, limit, eos_ids, metrics)
    return Generation(
        model, decoding, Reply(decoding, TOKENIZER.stream() if stream else None, splitter)
    )


# --- stopping ---


@pytest.mark.parametrize("eos", sorted(EOS))
def test_any_end_of_text_id_stops(eos):
    """Only the first of several end-of-text ids is looked for; or the id is cut off the answer."""
    model = ScriptedModel(10, 11, eos, 12)
    request = generation(model)
    assert list(request.tokens()) == [10, 11, eos]
    done = request.completion
    assert (done.token_ids, done.finish_reason) == ([10, 11, eos], "stop")
    assert len(model.calls) == 3


def test_end_of_text_first():
    """An answer that is empty but for its end runs on, or lacks its finish reason."""
    model = ScriptedModel(5, 10)
    request = generation(model)
    assert list(request.tokens()) == [5]
    assert request.completion.finish_reason == "stop"
    assert len(model.calls) == 1


def test_no_end_of_text_ids():
    """A model without an end of text is given one, 0 for instance."""
    request = generation(ScriptedModel(0, 3, 5), eos_ids=frozenset(), max_tokens=3)
    assert list(request.tokens()) == [0, 3, 5]
    assert request.completion.finish_reason == "length"


def test_ignore_eos():
    """A benchmark that asks for 4 tokens gets as many as the model likes to say."""
    request = generation(ScriptedModel(10, 3, 5, 11), max_tokens=4, ignore_eos=True)
    assert list(request.tokens()) == [10, 3, 5, 11]
    assert request.completion.finish_reason == "length"


def test_end_of_text_as_the_last_token_allowed():
    """A text that ended by itself is reported as cut."""
    request = generation(ScriptedModel(10, 5), max_tokens=2)
    assert list(request.tokens()) == [10, 5]
    assert request.completion.finish_reason == "stop"


def test_no_tokens_asked_for():
    """max_tokens=0 gives a token all the same, or runs the whole prompt for nothing."""
    model = ScriptedModel(10)
    request = generation(model, max_tokens=0)
    assert list(request) == []
    done = request.completion
    assert (done.text, done.token_ids, done.finish_reason) == ("", [], "length")
    assert model.calls == []
    assert done.metrics.per_forward_ms == [] and done.metrics.time_to_first_token_ms is None


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "expected"),
    [
        (15, 1, 1),
        (15, 2, 1),
        (15, None, 1),
        (14, 1, 1),
        (14, 2, 2),
        (14, 3, 2),
        (14, None, 2),
        (1, None, 15),
        (1, 10**9, 15),
    ],
)
def test_context_of_16(n_prompt, max_tokens, expected):
    """Generation runs past the context's end, or stops a token early; None means for ever."""
    model = ScriptedModel(*range(10, 40))
    request = generation(model, range(20, 20 + n_prompt), context=16, max_tokens=max_tokens)
    assert list(request.tokens()) == list(range(10, 10 + expected))
    assert request.completion.finish_reason == "length"
    assert len(model.fed) == n_prompt + expected - 1 < 16


# --- what the model is given ---


@pytest.mark.parametrize(
    ("n_prompt", "chunks"),
    [(1, [1]), (7, [7]), (8, [8]), (9, [8, 1]), (16, [8, 8]), (17, [8, 8, 1]), (20, [8, 8, 4])],
)
def test_prompt_in_chunks(n_prompt, chunks):
    """A chunk is fed twice, out of order or empty; or each chunk pays for the whole vocabulary."""
    model = ScriptedModel(10, 11, 12)
    prompt = list(range(100, 100 + n_prompt))
    request = generation(model, prompt, max_tokens=3)
    assert list(request.tokens()) == [10, 11, 12]
    prefill, decode = model.calls[: len(chunks)], model.calls[len(chunks) :]
    assert [len(ids) for ids, _, _ in prefill] == chunks
    assert [i for ids, _, _ in prefill for i in ids] == prompt
    assert [rows for _, _, rows in prefill] == [0] * (len(chunks) - 1) + [1]
    assert all(is_prompt for _, is_prompt, _ in prefill)
    assert decode == [([10], False, 1), ([11], False, 1)]


@pytest.mark.parametrize("n", [1, 2, 10])
def test_last_token_is_not_fed(n):
    """Each answer pays for one forward whose logits nobody reads."""
    model = ScriptedModel(*range(10, 30))
    request = generation(model, [1, 2], max_tokens=n)
    assert len(list(request.tokens())) == n
    assert len(model.calls) == n
    assert model.fed == [1, 2, *range(10, 10 + n - 1)]


def test_nothing_is_computed_ahead():
    """A reader who leaves after three tokens still pays for a fourth."""
    model = ScriptedModel(*range(10, 30))
    request = generation(model)
    tokens = request.tokens()
    assert model.calls == []
    assert [next(tokens) for _ in range(3)] == [10, 11, 12]
    assert len(model.calls) == 3
    tokens.close()
    done = request.completion
    assert (done.token_ids, done.finish_reason) == ([10, 11, 12], None)
    assert len(model.calls) == 3


@pytest.mark.parametrize("vocab_size", [33, 48])
def test_padding_of_the_logits_is_not_chosen(vocab_size):
    """An id past the vocabulary is chosen when the padding of the logits holds the largest."""
    model = ScriptedModel(32, 32, 32, vocab_size=vocab_size)  # new_logits fills with 7
    request = generation(model, max_tokens=2, stream=False)
    assert list(request.tokens()) == [32, 32]
    request = generation(model, max_tokens=1, stream=False, temperature=0.01, seed=0)
    assert list(request.tokens()) == [32]


def test_params_reach_the_sampler():
    """Temperature or seed is lost on the way: every request is greedy, or none is repeatable."""

    def drawn(seed: int) -> list[int]:
        model = ScriptedModel(*[10] * 20)
        params = {"temperature": 1.0, "seed": seed, "max_tokens": 20, "ignore_eos": True}
        return list(generation(model, **params).tokens())

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1) != [10] * 20


# --- text ---


def test_pieces_are_whole_characters():
    """An emoji split over tokens is shown as one U+FFFD a token."""
    assert len(EMOJI) > 1
    script = [*EMOJI, *TOKENIZER.encode("ab"), *EMOJI, 3]
    request = generation(ScriptedModel(*script), eos_ids=frozenset({3}))
    pieces = list(request)
    assert "".join(pieces) == request.completion.text == TOKENIZER.decode(script)
    assert "".join(pieces).startswith("😸ab😸")
    assert pieces[0] == "😸" and all(pieces) and "\ufffd" not in "".join(pieces)


def test_text_grows_with_the_pieces():
    """`completion` lags behind what the reader was shown, or runs ahead of it."""
    request = generation(ScriptedModel(*TOKENIZER.encode("To be, or not")), max_tokens=3)
    shown = ""
    for piece in request:
        shown += piece
        assert request.completion.text == shown
        assert shown == TOKENIZER.decode(request.completion.token_ids)
    assert request.completion.finish_reason == "length"


def test_end_inside_a_character_is_flushed():
    """max_tokens falls inside a character, and its bytes are lost."""
    script = [*TOKENIZER.encode("a"), *EMOJI]
    request = generation(ScriptedModel(*script), max_tokens=len(script) - 1)
    pieces = list(request)
    assert pieces == ["a", "\ufffd"]
    done = request.completion
    assert done.text == "a\ufffd" == TOKENIZER.decode(done.token_ids)


def test_end_of_text_after_half_a_character():
    """The flush is left out when the text ended by itself; or the end's own text is shown."""
    eos = TOKENIZER.encode("<|im_end|>")
    request = generation(ScriptedModel(EMOJI[0], *eos), eos_ids=frozenset(eos))
    assert list(request) == ["\ufffd"]
    assert request.completion.finish_reason == "stop"
    assert request.completion.token_ids == [EMOJI[0], *eos]


def test_ids_without_a_tokenizer():
    """A checkpoint without tokenizer files gives no ids, or "" for a text that nobody knows."""
    request = generation(ScriptedModel(10, 5), stream=False)
    assert list(request.tokens()) == [10, 5]
    assert request.completion.text is None
    with pytest.raises(AssertionError, match="tokenizer"):
        next(iter(generation(ScriptedModel(10), stream=False)))


# --- interruption ---


def test_before_the_first_token():
    """Asking for the completion of a request that has not begun fails, or calls it finished."""
    done = generation(ScriptedModel()).completion
    assert (done.text, done.token_ids, done.finish_reason) == ("", [], None)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("step failed")])
def test_interrupted_answer_is_kept(error):
    """Ctrl-C loses the text that was already on the screen, or marks it as finished."""
    script = TOKENIZER.encode("To be, or not")
    request = generation(ScriptedModel(*script[:3], error, *script[3:]), [1, 2])
    pieces = []
    with pytest.raises(type(error)):
        for piece in request:
            pieces.append(piece)
    done = request.completion
    assert done.token_ids == script[:3] and done.finish_reason is None
    assert done.text == "".join(pieces) == TOKENIZER.decode(script[:3])
    assert len(done.metrics.per_forward_ms) == 3  # of the one that failed nothing is told


def test_interrupted_prefill():
    """Ctrl-C during a long prompt leaves a completion that cannot be asked for."""
    model = ScriptedModel(KeyboardInterrupt())
    request = generation(model, range(20))
    with pytest.raises(KeyboardInterrupt):
        next(iter(request))
    done = request.completion
    assert (done.text, done.token_ids, done.finish_reason) == ("", [], None)
    assert done.metrics.per_forward_ms == []
    assert "n/a" in done.metrics.report("simd", "basic")


def test_completion_is_a_snapshot():
    """A completion taken half-way changes under its reader."""
    request = generation(ScriptedModel(10, 11, 12), max_tokens=3)
    tokens = request.tokens()
    next(tokens)
    early = request.completion
    assert list(tokens) == [11, 12]
    assert (early.token_ids, early.finish_reason) == ([10], None)


@pytest.mark.parametrize("stop", ["be", ["xyz", " or"], ["o be", "be,"]])
def test_stop_strings(stop):
    """A stop shown in part, or a model that goes on behind it; a request that is not stopped."""
    text = "To be, or not to be."
    ids = TOKENIZER.encode(text)
    model = ScriptedModel(*ids, 10, 11, 12)
    request = generation(model, stop=stop)
    stops = [stop] if isinstance(stop, str) else stop
    ends = [text.find(s) for s in stops if s in text]
    assert "".join(request) == text[: min(ends)]
    done = request.completion
    assert done.finish_reason == "stop" and done.text == text[: min(ends)]
    assert len(model.calls) < len(ids) and list(request) == []
    assert TOKENIZER.decode(done.token_ids).startswith(done.text)


def test_stop_strings_after_min_tokens():
    """A text that ends at its first word although more were asked for."""
    ids = TOKENIZER.encode("To be, or not to be, that")
    request = generation(ScriptedModel(*ids), stop="be", min_tokens=5, max_tokens=len(ids))
    assert "".join(request).startswith("To be, or not to ")


def test_stop_ids_and_logprobs():
    """An id that was asked to end the text and does not; logprobs of another token."""
    model = ScriptedModel(10, 11, 12, 13)
    request = generation(model, stop_token_ids=[12], logprobs=1)
    assert list(request.tokens()) == [10, 11, 12]
    done = request.completion
    assert done.finish_reason == "stop" and len(done.logprobs) == 3
    assert [top[0][0] for _, top in done.logprobs] == [10, 11, 12]
    assert all(own == top[0][1] < 0 for own, top in done.logprobs)
    assert generation(ScriptedModel(10), max_tokens=1).completion.logprobs is None


def test_a_prompt_is_part_of_what_is_repeated():
    """A repetition penalty that counts the output only."""
    model = ScriptedModel(7, 7)
    request = generation(model, prompt=(7, 8), repetition_penalty=10.0, max_tokens=1)
    assert list(request.tokens()) == [7]  # 1 / 10 is still the largest: others are 0
    assert request.session.ids == [7, 8, 7]


def test_thoughts_are_no_answer():
    """Thoughts shown as the answer, or the answer to an empty thought lost."""
    ids = TOKENIZER.encode("<think>\nTo be?\n</think>\n\nNot to be.")
    request = generation(ScriptedModel(*ids), splitter=ThinkingSplitter(), max_tokens=len(ids))
    parts = list(request.parts())
    assert "".join(text for kind, text in parts if kind == "reasoning") == "To be?"
    done = request.completion
    assert (done.text, done.reasoning) == ("Not to be.", "To be?")
    plain = generation(ScriptedModel(*ids), max_tokens=len(ids))
    assert "".join(plain).startswith("<think>") and plain.completion.reasoning is None
    empty = TOKENIZER.encode("<think>\n\n</think>\n\nNot.")
    request = generation(ScriptedModel(*empty), splitter=ThinkingSplitter(), max_tokens=len(empty))
    assert "".join(request) == "Not." and request.completion.reasoning is None


# --- times ---


def test_times_of_a_chunked_prefill():
    """Each chunk of the prompt counts as a forward, or only the last does; decode has the first."""
    request = generation(ScriptedModel(*range(10, 20)), range(20), max_tokens=4)
    list(request.tokens())
    metrics = request.completion.metrics
    assert metrics.per_forward_ms == pytest.approx([300, 100, 100, 100])  # 20 = 8 + 8 + 4
    assert metrics.time_to_first_token_ms == pytest.approx(300)
    assert metrics.decode_tokens_per_second == pytest.approx(1 / TENTH)


def test_cache_holds_all_but_the_last_token():
    """Rows are missing or doubled in the cache, and the next turn of a chat starts askew."""
    model = ScriptedModel(*range(10, 20))
    cache = BasicKvCache(n_layers=2, kv_dim=16)
    params = SamplingParams(temperature=0, max_tokens=4)
    clock = Metrics(lambda: 0.0)
    session = Session(cache, range(20), 20)
    decoding = Decoding(model.config.vocab_size, session, params, 4, EOS, clock)
    request = Generation(model, decoding, Reply(decoding, None))
    list(request.tokens())
    assert [cache.seq_len(layer) for layer in range(2)] == [23, 23]
    assert cache.counts.allocations == 4  # K and V of two layers, once


def test_iterating_again_goes_on():
    """A second loop over a request that was left would feed its prompt into a used cache."""
    model = ScriptedModel(10, 11, 12, 3)
    request = generation(model)
    for _ in request:
        break
    list(request)
    assert request.completion.token_ids == [10, 11, 12, 3]
    assert model.fed == [1, 10, 11, 12]
    assert list(request) == [] and request.completion.finish_reason == "stop"
