"""engine/decoding.py, with engine/reply.py: what a step of several tokens leaves behind."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import finish, ids_of_rows, request, script

import engine
from engine import LLM, SamplingParams
from engine.cache import PoolFull
from engine.grammar import Grammar
from engine.run import main
from engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_dir(Path(engine.__file__).parent / "assets")
SIZE = 2176
EOS = 2045  # <|endoftext|>
GREEDY = {"temperature": 0, "max_tokens": None}


def spelled(text: str) -> list[int]:
    """Ids of a text, a byte each: so that every boundary is one between tokens."""
    byte_of = {TOKENIZER.bytes_of(i): i for i in range(TOKENIZER.n_ids)}
    return [byte_of[bytes([b])] for b in text.encode()]


def run(said, params, prompt=(1, 2, 3), lookup=0, **more):
    """A model that says `said`: pieces of the text, what came of it, and its session."""
    model = script(list(said), SIZE, len(prompt))
    more = {"tokenizer": TOKENIZER, "eos_ids": [EOS], "lookup": lookup} | more
    generation, decoding = request(model, list(prompt), params, **more)
    return list(generation), generation.completion, decoding.session, model


def outcome(done, session) -> tuple:
    figures = done.text, done.reasoning, done.token_ids, done.finish_reason, done.logprobs
    return *figures, session.ids, session.n_prompt, ids_of_rows(session.cache)


# --- stop strings in a step of several tokens ---

LETTERS = st.text("ab é漢😸\u0301", max_size=40)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_stops_are_never_leaked(data):
    """Part of a stop string is shown, or what follows it; or the tokens behind a stop that came in
    the same step stay in the output, in the session or in its cache."""
    text = data.draw(LETTERS)
    stops = data.draw(st.lists(st.text("ab é漢😸\u0301", min_size=1, max_size=4), max_size=3))
    seen = data.draw(LETTERS)
    encode = data.draw(st.sampled_from([spelled, TOKENIZER.encode_plain]))
    text = TOKENIZER.decode(encode(text))  # the tokenizer joins accents to their letters
    prompt = [7, *spelled(seen + text)] if data.draw(st.booleans()) else [7, *encode(text), 8]
    params = SamplingParams(stop=stops, logprobs=1, **GREEDY)
    said = [*encode(text), EOS]
    (pieces, plain, left, _), (some, done, session, model) = (
        run(said, params, prompt, lookup) for lookup in (0, 8)
    )
    assert outcome(done, session) == outcome(plain, left)
    # the stop that is complete first; of several at one character, the longest
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    wanted = text[: min(ends)[1]] if ends else text
    assert "".join(pieces) == "".join(some) == done.text == wanted
    assert done.finish_reason == "stop" and not any("\ufffd" in piece for piece in some)
    # only as many tokens as the text needs, and rows of all but the last
    shorter = TOKENIZER.decode(done.token_ids[:-1])
    assert not any(stop in shorter for stop in stops)
    assert ids_of_rows(session.cache) == session.ids[:-1] == [*prompt, *done.token_ids[:-1]]
    assert done.metrics.accepted_tokens < max(len(done.token_ids), 1)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2044) | st.sampled_from(spelled("😸漢é\u0301a")), max_size=30),
    st.integers(0, 8),
)
def test_pieces_join_to_the_text(ids, lookup):
    """A piece that is lost, twice there or half a character, in bytes that are no text either."""
    pieces, done, _, _ = run([*ids, EOS], SamplingParams(**GREEDY), [1, *ids, 1], lookup)
    raw = b"".join(map(TOKENIZER.bytes_of, ids))
    assert "".join(pieces) == done.text == TOKENIZER.decode(ids) == raw.decode("utf-8", "replace")
    assert all(pieces) and done.token_ids == [*ids, EOS]


def test_metrics_of_a_stop():
    """Tokens behind a stop count as accepted, or as decoded."""
    text = "to be or not to be, that is"
    ids = spelled(text)
    params = SamplingParams(stop="not", **GREEDY)
    _, done, _, _ = run(ids, params, [1, *ids, 1], 8)
    n = len("to be or not")
    assert len(done.token_ids) == n
    steps = len(done.metrics.per_forward_ms)
    assert steps < n and done.metrics.accepted_tokens in (n - steps, n - steps + 1)
    assert len(done.metrics._token_times) == n


def test_a_stop_of_what_is_no_character():
    """A text that ended before its stop string, half a character, and is called cut."""
    half = spelled("😸")[:2]
    params = SamplingParams(stop="\ufffd", temperature=0, max_tokens=3)
    pieces, done, _, _ = run([*spelled("a"), *half], params)
    assert ("".join(pieces), done.text, done.finish_reason) == ("a", "a", "stop")


@pytest.mark.parametrize("lookup", [0, 8])
def test_stops_count_after_min_tokens(lookup):
    """A stop within the first tokens ends the text, or one behind them in the same step does
    not."""
    ids = spelled("abcabcabcabc")
    params = SamplingParams(stop="ab", min_tokens=5, **GREEDY)
    _, done, session, _ = run(ids, params, [1, *ids, 1], lookup)
    assert done.text == "abcabc" and len(done.token_ids) == 8
    assert ids_of_rows(session.cache) == session.ids[:-1]


# --- the end in the middle of a step ---


@pytest.mark.parametrize("n", range(1, 14))
def test_max_tokens_in_a_step(n):
    """More tokens than were asked for, because they came together."""
    ids = spelled("to be or not to be")
    _, done, session, _ = run(ids, SamplingParams(temperature=0, max_tokens=n), [1, *ids], 8)
    assert done.token_ids == ids[:n] and done.finish_reason == "length"
    assert ids_of_rows(session.cache) == session.ids[:-1] == [1, *ids, *ids[: n - 1]]


@pytest.mark.parametrize("at", range(1, 10))
def test_an_end_in_a_step(at):
    """A text that goes on behind its end, because more was guessed and would have come."""
    ids = spelled("to be or not to be")
    ids[at] = EOS
    _, done, session, _ = run(ids, SamplingParams(**GREEDY), [1, 2, *ids, 1, 2], 8)
    assert done.token_ids == ids[: at + 1] and done.finish_reason == "stop"
    assert session.ids == [1, 2, *ids, 1, 2, *ids[: at + 1]]
    assert ids_of_rows(session.cache) == session.ids[:-1]
    assert done.metrics.accepted_tokens > at - 2  # all but the first of two or three steps


# --- what goes wrong in a step ---


class Interrupting(list):
    """Raises when the n-th token has been appended to it."""

    n = 0

    def append(self, token):
        super().append(token)
        if len(self) == self.n:
            raise KeyboardInterrupt


@pytest.mark.parametrize("n", range(1, 12))
def test_interrupted_among_guesses(n):
    """Ctrl-C while the tokens of a step are looked at leaves rows of guesses, and the next turn
    reads them as the conversation's."""
    prompt = [1, *spelled("to be or not to be"), 1]
    said = spelled("to be at not to bed")
    model = script(said, SIZE, len(prompt))
    generation, decoding = request(model, prompt, SamplingParams(**GREEDY), lookup=8)
    decoding.session.ids = ids = Interrupting(prompt)
    ids.n = len(prompt) + n
    with pytest.raises(KeyboardInterrupt):
        finish(generation)
    session = decoding.session
    assert session.ids == [*prompt, *said[:n]]
    assert ids_of_rows(session.cache) == session.ids[:-1]
    session.ids = list(ids)
    on, _ = request(model, session.ids + [5], SamplingParams(temperature=0), session=session)
    assert on.completion.metrics.cached_tokens == len(prompt) + n - 1


@pytest.mark.parametrize("after", [False, True])
def test_a_step_that_fails(after):
    """A step that was interrupted when its rows were there already, those of guesses too."""
    prompt = [1, *spelled("to be or not to be"), 1]
    model = script(spelled("to be at not to bed"), SIZE, len(prompt))
    forward = model.forward

    def failing(runs, logits, profile=None):
        if len(model.runs) == 6 and not after:
            raise RuntimeError("failed")
        forward(runs, logits, profile)
        if len(model.runs) == 6:
            raise RuntimeError("failed")

    model.forward = failing
    generation, decoding = request(model, prompt, SamplingParams(**GREEDY), lookup=8)
    with pytest.raises(RuntimeError):
        finish(generation)
    session = decoding.session
    assert ids_of_rows(session.cache) == session.ids[:-1]
    assert session.ids == [*prompt, *decoding.token_ids]


def test_a_step_without_its_guesses_that_fails():
    """The row of the last token is left there, and the next turn has nothing to run."""
    prompt = [1, *spelled("to be or not to be"), 1]
    model = script(spelled("to be at not to bed"), SIZE, len(prompt))
    forward, refused = model.forward, []

    def failing(runs, logits, profile=None):
        if len(logits) > 1:
            refused.append(len(logits))
            raise PoolFull("no blocks for guesses")
        forward(runs, logits, profile)
        if refused:
            raise KeyboardInterrupt

    model.forward = failing
    generation, decoding = request(model, prompt, SamplingParams(**GREEDY), lookup=8)
    with pytest.raises(KeyboardInterrupt):
        finish(generation)
    assert refused and ids_of_rows(decoding.session.cache) == decoding.session.ids[:-1]


def test_logits_that_are_not_finite_among_guesses():
    """An overflow behind a wrong guess, which nobody asked for, that ends the text; or one of a
    token of the text that does not."""
    prompt = [1, *spelled("abcdefgh"), 1]
    said = spelled("abcdXfgh")
    model = script(said, SIZE, len(prompt))
    says = model._says

    def overflowing(held):
        if held[len(prompt) :] == spelled("abcde"):  # a guess that does not come
            return np.full(SIZE, np.nan, np.float32)
        return says(held)

    model._says = overflowing
    params = SamplingParams(temperature=0, max_tokens=8)
    done = finish(request(model, prompt, params, lookup=8)[0])
    assert done.token_ids == said
    assert max(len(ids) for ids, is_prompt, _ in model.runs if not is_prompt) > 3
    model = script(said, SIZE, len(prompt))
    model._says = lambda held: overflowing(held) * (np.nan if len(held) == 15 else 1)
    generation, decoding = request(model, prompt, params, lookup=8)
    with pytest.raises(ValueError, match="not finite"):
        finish(generation)
    assert decoding.token_ids == said[:5]
    assert ids_of_rows(decoding.session.cache) == decoding.session.ids[:-1]


# --- constrained, and guessed ---

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": ["to be", "or not"]}}},
    "required": ["a"],
    "additionalProperties": False,
}


def grammar_of(params) -> Grammar | None:
    return Grammar.of(params, TOKENIZER, SIZE, [EOS])


@pytest.mark.parametrize("lookup", [0, 8])
@pytest.mark.parametrize("seed", range(6))
def test_constrained_and_guessed(seed, lookup):
    """A guess that the grammar does not allow, or a grammar that has taken a guess for a token."""
    words = spelled('{"a": ["to be", "or not", "to be", "to be"]}')
    prompt = [1, *words * 2, 1]
    params = SamplingParams(
        seed=seed, temperature=1.0, max_tokens=200, json_schema=SCHEMA, logprobs=1
    )
    model_says = script(words * 5, SIZE, len(prompt), 8.0)  # likely, and often not what comes

    def once(lookup):
        grammar = grammar_of(params)
        generation, decoding = request(
            model_says,
            prompt,
            params,
            tokenizer=TOKENIZER,
            eos_ids=[EOS],
            lookup=lookup,
            grammar=grammar,
        )
        return outcome(finish(generation, text=True), decoding.session), generation.completion

    (plain, _), (found, done) = once(0), once(lookup)
    assert found == plain
    assert done.finish_reason == "length" or set(json.loads(done.text)) == {"a"}
    if lookup:
        assert done.metrics.guessed_tokens > done.metrics.accepted_tokens > 0


@pytest.fixture(scope="module")
def llms() -> tuple[LLM, LLM]:
    return LLM(), LLM(lookup=8)


@pytest.mark.parametrize("stop", ["man", ["be\n", " a man, and"], "e"])
def test_stops_in_company(stop, llms):
    """What follows a stop string stays in the output of one of several, or in its figures."""
    params = SamplingParams(temperature=0, max_tokens=60, stop=stop, logprobs=0)
    prompts = ["To be, or not to be", "a man, and a man, and a man, and", "that I am, that I am"]
    alone = [llms[0].generate(prompt, params) for prompt in prompts]
    for done in (llms[1].generate(prompts, params), [llms[1].generate(p, params) for p in prompts]):
        for a, b in zip(done, alone, strict=True):
            assert (a.text, a.token_ids, a.logprobs) == (b.text, b.token_ids, b.logprobs)
            assert a.finish_reason == b.finish_reason
            assert a.metrics.accepted_tokens <= max(len(a.token_ids), 1)


def test_tokens_have_a_text():
    """Ids that go on behind a stop string because nobody reads the text; or a text that is empty
    because the ids were read."""
    ids = spelled("to be or not to be")
    for lookup in (0, 8):
        model = script(ids, SIZE, 20)
        prompt = [1, *ids, 1]
        params = SamplingParams(stop="or", **GREEDY)
        generation, decoding = request(model, prompt, params, tokenizer=TOKENIZER, lookup=lookup)
        assert list(generation.tokens()) == ids[:8] == generation.completion.token_ids
        assert generation.completion.text == "to be "
        assert decoding.session.ids == [*prompt, *ids[:8]]


REGEXES = {
    "words": r"(To be|or not|to be)(, (to be|or not)){2,5}\.",
    "digits": r"[0-9]{3}-[0-9]{4}",
    "characters": r"[é漢😸]{4}",
    "nothing": r"",
    "one": r"abc",
    "open": r"[a-z ]*",
}


@pytest.mark.parametrize("name", REGEXES)
@pytest.mark.parametrize("asked", [{}, {"ignore_eos": True}, {"min_tokens": 30}])
def test_a_regex(name, asked, llms):
    """An output that does not match and is not called cut; a text that is complete and an error,
    because what might end it may not come."""
    for seed in range(3):
        params = SamplingParams(max_tokens=40, seed=seed, regex=REGEXES[name], logprobs=0, **asked)
        plain, done = (llm.generate("To be, or not to be", params) for llm in llms)
        assert (done.token_ids, done.logprobs) == (plain.token_ids, plain.logprobs)
        assert done.finish_reason == plain.finish_reason and done.text == plain.text
        if done.finish_reason == "stop":
            assert re.fullmatch(REGEXES[name], done.text)
        else:
            assert done.finish_reason == "length" and len(done.token_ids) == 40
        assert "".join(llms[1].stream("To be, or not to be", params)) == done.text
    if name != "open":  # it is complete somewhere
        assert done.finish_reason == "stop"
    elif asked:
        assert len(done.token_ids) >= 30


SCHEMAS = {
    "object": SCHEMA,
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "n": {"type": "integer", "minimum": 1, "maximum": 12},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "n", "ok"],
        "additionalProperties": False,
    },
    "constant": {"const": "To be"},
    "number": {"type": "number"},
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema(name, temperature, llms):
    """An output that is neither valid nor called cut."""
    for seed in range(3):
        params = SamplingParams(
            max_tokens=120, seed=seed, temperature=temperature, json_schema=SCHEMAS[name]
        )
        plain, done = (llm.generate("To be, or not to be", params) for llm in llms)
        assert (done.token_ids, done.finish_reason) == (plain.token_ids, plain.finish_reason)
        together = llms[1].generate(["To be, or not to be"] * 2, params)
        assert [d.token_ids for d in together] == [done.token_ids] * 2
        if done.finish_reason == "length":
            assert len(done.token_ids) == 120
            continue
        value = json.loads(done.text)
        if name == "object":
            assert set(value["a"]) <= {"to be", "or not"}
        elif name == "nested":
            assert list(value) == ["name", "n", "ok"] and 1 <= value["n"] <= 12
        elif name == "constant":
            assert value == "To be"
        else:
            assert isinstance(value, int | float)


def test_max_tokens_cuts_a_constrained_text(llms):
    """A text that was cut and is called complete; or one that is complete at its last token and is
    called cut."""
    for llm in llms:
        params = {"temperature": 0, "regex": "abcabcabc"}
        whole = llm.generate("x", SamplingParams(max_tokens=40, **params))
        n = len(whole.token_ids)
        exact = llm.generate("x", SamplingParams(max_tokens=n, **params))
        assert (exact.text, exact.finish_reason) == ("abcabcabc", "stop")
        cut = llm.generate("x", SamplingParams(max_tokens=n - 1, **params))
        assert cut.finish_reason == "length" and "abcabcabc".startswith(cut.text)
        assert len(cut.text) < 9


# --- as the README shows it ---

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.mark.skipif(not README.exists(), reason="needs the repository")
def test_the_readme_shows_what_is_printed(capsys):
    """Commands that do not work, or an output that nobody has seen."""
    block = README.read_text(encoding="utf-8").split("<!-- constrained -->")[1].split("```")[1]
    for shown in block.split("$ python -m engine.run ")[1:]:
        command, _, wanted = shown.partition("\n")
        assert main(shlex.split(command)) == 0
        out, err = capsys.readouterr()
        told = [line for line in err.splitlines(True) if line.startswith(("warning", "came of"))]
        assert out + "".join(told) == wanted
