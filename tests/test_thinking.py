"""engine/thinking.py: thoughts told from answers, and closed where they take too long."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import RowsModel, ids_of_rows, request, script

import engine
from engine import LLM, SamplingParams
from engine.metrics import Metrics
from engine.run import main
from engine.session import Session
from engine.thinking import (
    CLOSE,
    OPEN,
    ThinkingBudget,
    ThinkingSplitter,
    closing_ids,
    split_thinking,
)
from engine.tokenizer import Tokenizer

ASSETS = Path(engine.__file__).parent / "assets"
BUILT_IN = Tokenizer.from_dir(ASSETS)
SIZE = 2176


# --- thoughts and answers told apart ---


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("", False, (None, "")),
        ("Hi\n", False, (None, "Hi\n")),
        ("\n\nHi", False, (None, "\n\nHi")),
        ("<think>\nhm\n</think>\n\nHi\n", False, ("hm", "Hi\n")),
        ("\n<think>a\n\nb\n\n</think>Hi", False, ("a\n\nb", "Hi")),
        ("<think>\n\n</think>\n\nHi", False, (None, "Hi")),
        ("<think></think>", False, (None, "")),
        ("<think>\nhm\n", False, ("hm", "")),
        ("<think>\nhm\n</thin", False, ("hm\n</thin", "")),
        (
            "<think>hm</ think></think>a</think><think>b</think>",
            False,
            ("hm</ think>", "a</think><think>b</think>"),
        ),
        ("Hi <think>a</think>", False, (None, "Hi <think>a</think>")),
        ("a</think>b", False, (None, "a</think>b")),
        ("<thin", False, (None, "<thin")),
        ("\n<thin", False, (None, "\n<thin")),
        ("<thinking>", False, (None, "<thinking>")),
        ("\nhm\n</think>\n\nHi", True, ("hm", "Hi")),
        ("<think>\nhm</think>Hi", True, ("hm", "Hi")),
        ("hm", True, ("hm", "")),
        ("</think>Hi", True, (None, "Hi")),
        ("\n<thin", True, ("<thin", "")),
        ("", True, (None, "")),
    ],
)
def test_split_thinking(text, opened, parts):
    """A reader is shown tags, thoughts as an answer, or an answer as thoughts."""
    assert split_thinking(text, opened) == parts


def split_by_pattern(text: str, opened: bool) -> tuple[str | None, str]:
    """`split_thinking` in one regular expression."""
    begin = r"\n*(?:<think>)?" if opened else r"\n*<think>"
    match = re.fullmatch(begin + r"\n*(.*?)\n*(?:</think>\n*(.*)|\Z)", text, re.DOTALL)
    return (match[1] or None, match[2] or "") if match else (None, text)


REPLIES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</", "think>", ">", "\n", "\n\n", "a", "é b"])
).map("".join)


@settings(max_examples=500, deadline=None)
@given(REPLIES, st.booleans(), st.data())
def test_pieces_of_a_reply(text, opened, data):
    """A tag or a newline at the edge of a piece is shown, lost or taken for the other kind."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    splitter = ThinkingSplitter(opened)
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += splitter.push(text[start:stop])
    pieces += splitter.flush()
    assert all(piece for _, piece in pieces)
    assert [kind for kind, _ in pieces] == sorted((kind for kind, _ in pieces), reverse=True)
    parts = {kind: "".join(p for k, p in pieces if k == kind) for kind in ("reasoning", "answer")}
    whole = (parts["reasoning"] or None, parts["answer"])
    assert whole == split_thinking(text, opened) == split_by_pattern(text, opened)


def test_pieces_are_never_late():
    """A reader waits for text that could be shown already."""
    splitter = ThinkingSplitter()
    pushed = [
        "\n",
        "<thi",
        "nk>\n",
        "\nI",
        "f a <",
        " b",
        "\n",
        "\nc</thin",
        "g",
        "\n</think>",
        "\n",
        "\nHi",
        "\n",
    ]
    assert [splitter.push(piece) for piece in pushed] == [
        *([], [], [], [("reasoning", "I")], [("reasoning", "f a ")], [("reasoning", "< b")], []),
        *([("reasoning", "\n\nc")], [("reasoning", "</thing")], [], [], [("answer", "Hi")]),
        [("answer", "\n")],
    ]
    assert splitter.flush() == []
    assert ThinkingSplitter().push("H") == [("answer", "H")]


# --- thoughts that end after some tokens ---


@pytest.fixture(scope="module")
def qwen3(qwen3_tokenizer_dir) -> Tokenizer:
    return Tokenizer.from_dir(qwen3_tokenizer_dir)


@pytest.fixture(scope="module")
def untagged(qwen3_tokenizer_dir, tmp_path_factory) -> Tokenizer:
    """Qwen3's, as it was before it knew the tags; it has a token for `>` and two newlines."""
    path = tmp_path_factory.mktemp("untagged")
    raw = json.loads((qwen3_tokenizer_dir / "tokenizer.json").read_text())
    added = [token for token in raw["added_tokens"] if token["content"] not in (OPEN, CLOSE)]
    (path / "tokenizer.json").write_text(json.dumps(raw | {"added_tokens": added}))
    return Tokenizer.from_dir(path)


@pytest.fixture(scope="module", params=["built-in", "qwen3", "untagged"])
def tokenizer(request) -> Tokenizer:
    """One to which the tags are tokens, and two to which they are text."""
    return BUILT_IN if request.param == "built-in" else request.getfixturevalue(request.param)


def replied(tokenizer: Tokenizer, n: int, opened: bool, said: list[int]) -> list[int]:
    """A reply of a model that says `said`, but for what a budget of `n` forces."""
    budget = ThinkingBudget(n, tokenizer, opened)
    ids, forced, said = [], budget.begin(), iter(said)
    while True:
        token = forced.pop(0) if forced else next(said, None)
        if token is None:
            return ids
        ids.append(token)
        forced = forced or budget.take(token)


def test_the_closing_is_qwen3s(qwen3):
    """Thoughts that are closed with other ids than those the model was trained on."""
    assert closing_ids(qwen3) == [198, 151668, 271] == qwen3.encode("\n</think>\n\n")


def test_the_closing_of_any_tokenizer(tokenizer):
    """A closing tag whose ids depend on what is before it, so that nothing finds it again."""
    closing, tag = closing_ids(tokenizer), tokenizer.encode(CLOSE)
    assert tokenizer.decode(closing) == "\n</think>\n\n"
    places = [i for i in range(len(closing)) if closing[i : i + len(tag)] == tag]
    assert len(places) == 1


@pytest.mark.parametrize("n", range(6))
@pytest.mark.parametrize("begins", ["", OPEN, "\n\n" + OPEN, OPEN + "\n"])
def test_closed_after_n(n, begins, tokenizer):
    """One token too many or too few; a block that the model opens itself is never closed."""
    opened = not begins
    thoughts = [tokenizer.encode(c)[0] for c in "abcdefgh"]
    said = tokenizer.encode(begins) + thoughts if begins else thoughts
    n_before = len(said) - len(thoughts)
    if begins.endswith("\n"):  # the newline is a thought's token, or the end of the tag's
        n_before = next(i for i in range(9) if OPEN in tokenizer.decode(said[:i]))
    cut = n_before + n
    wanted = said[:cut] + closing_ids(tokenizer) + said[cut:]
    assert replied(tokenizer, n, opened, said) == wanted
    reasoning, answer = split_thinking(tokenizer.decode(wanted), opened)
    assert (reasoning or "") + answer == "abcdefgh"


@pytest.mark.parametrize(
    ("opened", "text"),
    [
        (True, "ab</think>\n\nan answer of many tokens"),
        (True, "</think>an answer of many tokens"),
        (False, "<think>ab</think>an answer of many tokens"),
        (False, "<think></think>an answer of many tokens"),
        (False, "an answer of many tokens"),
        (False, "an answer <think> of many tokens"),
        (False, "<thin an answer of many tokens"),
        (False, "</think> an answer of many tokens"),
        (False, "<think>a</think><think> an answer of many tokens"),
    ],
)
def test_an_answer_is_never_cut(opened, text, tokenizer):
    """An answer is interrupted by a tag, because it was counted with thoughts."""
    said = tokenizer.encode(text)
    n = 4 + len(tokenizer.encode(CLOSE))
    assert replied(tokenizer, n, opened, said) == said
    spelled_out = [i for c in text for i in tokenizer.encode_plain(c)]  # other ids, the same text
    assert replied(tokenizer, 4 + len(CLOSE), opened, spelled_out) == spelled_out


@settings(max_examples=300, deadline=None)
@given(REPLIES, st.booleans(), st.integers(0, 6))
def test_budget_and_splitter_agree(text, opened, n):
    """The budget and the splitter see the block begin or end at different places: thoughts go on
    for ever, or a tag is put in an answer."""
    said = [i for c in text for i in BUILT_IN.encode_plain(c)]
    ids = replied(BUILT_IN, n, opened, said)
    before, answer = split_thinking(text, opened)
    reasoning, after = split_thinking(BUILT_IN.decode(ids), opened)
    if ids == said:
        assert len((reasoning or "").strip()) <= n
        return
    assert len(ids) == len(said) + len(closing_ids(BUILT_IN))
    cut = next(i for i in range(len(said) + 1) if ids[:i] + closing_ids(BUILT_IN) + said[i:] == ids)
    assert split_thinking(BUILT_IN.decode(said[:cut]), opened)[1] == ""  # it was no answer yet
    assert after == BUILT_IN.decode(said[cut:]).lstrip("\n")


# --- in requests ---

A, B = BUILT_IN.encode("a")[0], BUILT_IN.encode("b")[0]
CLOSING = closing_ids(BUILT_IN)


def thinking(said, n: int, opened=True, lookup=0, prompt=(7, 8), model=None, **params):
    """A completion of a model that says `said`, the forced ids among them; its session; model."""
    asked = SamplingParams(**{"temperature": 0, "max_tokens": len(said), **params})
    model = model or script(list(said), SIZE, len(prompt))
    budget = ThinkingBudget(n, BUILT_IN, opened)
    splitter = ThinkingSplitter(opened)
    more = {"tokenizer": BUILT_IN, "splitter": splitter, "budget": budget, "lookup": lookup}
    generation, decoding = request(model, list(prompt), asked, **more)
    parts = list(generation.parts())
    return parts, generation.completion, decoding.session, model


@pytest.mark.parametrize("lookup", [0, 5])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_forced_in_one_step(n, lookup):
    """A step for each forced id; thoughts or their end among the answer; what follows the tag as
    thoughts; forced ids that count as guesses."""
    said = [A] * n + [0] * len(CLOSING) + [B] * 4  # what it says instead of the tag is not asked
    parts, done, session, model = thinking(said, n, lookup=lookup, logprobs=1)
    assert done.token_ids == [A] * n + CLOSING + [B] * 4
    assert (done.reasoning, done.text, done.finish_reason) == ("a" * n or None, "bbbb", "length")
    assert [kind for kind, _ in parts] == sorted((kind for kind, _ in parts), reverse=True)
    assert "".join(text for kind, text in parts if kind == "answer") == "bbbb"
    assert ids_of_rows(session.cache) == session.ids[:-1] == [7, 8, *done.token_ids[:-1]]
    assert len(done.logprobs) == len(done.token_ids)
    # each of the model's own opinion: of the forced ids another was the likeliest
    for token, (own, [(first, best)]) in zip(done.token_ids, done.logprobs, strict=True):
        forced = token in CLOSING
        assert (first == 0 and own < best) if forced else (first == token and own == best)
    runs = [ids for ids, is_prompt, _ in model.runs if not is_prompt]
    assert [A] * bool(n) + CLOSING in runs
    n_forced = len(CLOSING) - (n == 0)  # behind a known one, in a step
    assert done.metrics.guessed_tokens == sum(len(ids) - 1 for ids in runs) - n_forced
    assert done.metrics.accepted_tokens <= done.metrics.guessed_tokens


@pytest.mark.parametrize("lookup", [0, 5])
@pytest.mark.parametrize("max_tokens", range(3, 5 + len(CLOSING)))
def test_max_tokens_among_forced_ids(max_tokens, lookup):
    """A tag that is not cut where the text is; or a step past the last token."""
    said = [A] * 3 + [0] * len(CLOSING) + [B] * 4
    _, done, session, _ = thinking(said, 3, lookup=lookup, max_tokens=max_tokens)
    assert done.token_ids == ([A] * 3 + CLOSING + [B] * 4)[:max_tokens]
    assert done.finish_reason == "length" and len(session.ids) == 2 + max_tokens
    assert ids_of_rows(session.cache) == session.ids[:-1]


def test_forced_ids_are_penalised():
    """Penalties that count only what was sampled."""
    last = CLOSING[-1]

    def says(held):
        logits = np.zeros(SIZE, np.float32)
        logits[last], logits[B] = 1.0, 0.5
        return logits

    params = {"max_tokens": len(CLOSING) + 1, "presence_penalty": 0.9}
    _, done, _, _ = thinking([], 0, model=RowsModel(SIZE, says), **params)
    assert done.token_ids == [*CLOSING, B]
    _, done, _, _ = thinking(
        [], 0, model=RowsModel(SIZE, says), max_tokens=len(CLOSING) + 1, presence_penalty=0.4
    )
    assert done.token_ids == [*CLOSING, last]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 20), st.integers(0, 99), st.integers(1, 12))
def test_forced_ids_and_guesses(n, seed, lookup):
    """Guesses that stand where ids are forced, or a draw that is lost for each forced id."""
    text = [A, B] * 6 + CLOSING + [B, A, A] * 5
    model = script(text * 3, SIZE, 40, 7.0)
    prompt = (text * 3)[:40]
    params = {"max_tokens": 50, "temperature": 1.0, "seed": seed, "logprobs": 1, "top_k": 4}
    plain, done = (
        thinking([], n, prompt=prompt, model=model, lookup=some, **params) for some in (0, lookup)
    )
    assert done[1].token_ids == plain[1].token_ids and done[1].logprobs == plain[1].logprobs
    assert (done[1].reasoning, done[1].text) == (plain[1].reasoning, plain[1].text)
    assert ids_of_rows(done[2].cache) == ids_of_rows(plain[2].cache)


# --- with a real model ---

TEMPLATES = {
    "opened": "{{ messages[-1].content }}\n{{ '<think>\n' }}",
    "free": "{{ messages[-1].content }}\n",
}
HELLO = [{"role": "user", "content": "What is thy name?"}]


@pytest.fixture(scope="module", params=TEMPLATES)
def checkpoint(request, tmp_path_factory) -> Path:
    """The built-in model, with a template that begins thoughts, or one that does not."""
    path = tmp_path_factory.mktemp(request.param) / request.param
    shutil.copytree(ASSETS, path, ignore=shutil.ignore_patterns("__*"))
    (path / "chat_template.jinja").write_text(TEMPLATES[request.param])
    return path


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(checkpoint, weights="f32")


def one_by_one(llm: LLM, params: SamplingParams):
    """A completion whose generated and forced ids are run one a step."""
    ids, splitter = llm.chat_prompt(HELLO)
    session = Session(llm.new_cache(), ids, len(ids))
    decoding, reply = llm.requests.begin(
        session, params, llm.requests.limit(len(ids), params), Metrics(), splitter=splitter
    )
    while not decoding.finish_reason:
        run = decoding.next_run(1 if session.cache.seq_len(0) >= len(ids) - 1 else len(ids) - 1)
        logits = llm._model.new_logits(run.n_logits)
        llm._model.forward([run], logits)
        reply.push(decoding.take(logits))
    reply.flush()
    return reply.completion


@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("asked", [{"temperature": 0}, {"seed": 3, "repetition_penalty": 1.2}])
def test_the_same_as_one_by_one(n, asked, llm, checkpoint):
    """Ids that are forced together give other logits to what follows than one after the other."""
    params = SamplingParams(max_tokens=40, thinking_budget=n, logprobs=1, **asked)
    if checkpoint.name == "free":  # it says so itself
        tag = BUILT_IN.encode(OPEN)
        params = SamplingParams(
            max_tokens=40,
            thinking_budget=n,
            logprobs=1,
            **asked | {"logit_bias": dict.fromkeys(tag, 100)},
        )
    done, wanted = llm.chat(HELLO, params), one_by_one(llm, params)
    assert done.token_ids == wanted.token_ids and done.logprobs == wanted.logprobs
    assert (done.text, done.reasoning) == (wanted.text, wanted.reasoning)
    if checkpoint.name == "opened":
        assert done.token_ids[n : n + len(CLOSING)] == CLOSING and done.text
        assert (done.reasoning is None) == (n == 0)
        assert len(done.metrics.per_forward_ms) < len(wanted.metrics.per_forward_ms)
    guessing = LLM(checkpoint, weights="f32", lookup=5).chat(HELLO, params)
    assert guessing.token_ids == done.token_ids and guessing.logprobs == done.logprobs
    parts = list(llm.stream_chat(HELLO, params).parts())
    told = {kind: "".join(t for k, t in parts if k == kind) for kind in ("reasoning", "answer")}
    assert told == {"reasoning": done.reasoning or "", "answer": done.text}


@pytest.mark.parametrize("n", [0, 5, None])
def test_an_answer_behind_thoughts_is_constrained(n, llm, checkpoint):
    """Thoughts that have to be JSON, or an answer behind a forced tag that need not."""
    params = SamplingParams(
        max_tokens=100, seed=1, thinking_budget=n, json_schema={"enum": ["Romeo", "Juliet"]}
    )
    several = llm.chat(HELLO, SamplingParams(**vars(params) | {"n": 2}))
    for done in (llm.chat(HELLO, params), *several):
        if checkpoint.name == "opened" and n is None:  # it thinks to the end
            assert done.finish_reason == "length" and not done.text
            continue
        assert json.loads(done.text) in ("Romeo", "Juliet") and done.finish_reason == "stop"
        assert bool(done.reasoning) == (checkpoint.name == "opened" and n == 5)


def test_a_constrained_text_that_spells_the_tag(llm):
    """An output that may have tags in it is interrupted by one that it may not have there."""
    params = SamplingParams(max_tokens=40, thinking_budget=0, regex="<think>[ab]{9}", seed=0)
    done = llm.chat(HELLO, params)
    answer = BUILT_IN.decode(done.token_ids).removeprefix("\n</think>\n\n")
    assert re.fullmatch("<think>[ab]{9}", answer)


# --- at the command line ---


def test_a_budget_on_the_command_line(checkpoint, capsys):
    """An option that is taken and not passed on, or not told with the settings in force."""
    argv = ["What?", "--chat", "--model", str(checkpoint), "--thinking-budget", "3", "--lookup"]
    argv += ["4", "--max-tokens", "30", "--seed", "1", "--json", "--regex", "Ay|No"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] in ("Ay", "No")
    assert bool(found["reasoning"]) == (checkpoint.name == "opened")
    wanted = {"thinking_budget": 3, "lookup": 4, "regex": "Ay|No", "json_schema": None, "seed": 1}
    assert {name: found["settings"][name] for name in wanted} == wanted


BAD = [
    (["--lookup", "65"], "lookup is 65; a whole number from 0 to 64 is needed"),
    (["--lookup", "-1"], "lookup is -1; "),
    (["--lookup", "many"], "argument --lookup: invalid int value: 'many'"),
    (["--thinking-budget", "3"], "--thinking-budget is for --chat"),
    (["--thinking-budget", "0"], "--thinking-budget is for --chat"),
    (["--chat", "--thinking-budget", "-1"], "thinking_budget is -1; "),
    (["--chat", "--thinking-budget", "1.5"], "argument --thinking-budget: invalid int value"),
    (["--regex", "("], "regex cannot be used: "),
    (["--regex", "a(?=b)"], "regex cannot be used: "),
    (["--json-schema", "{"], "json_schema is '{', not JSON "),
    (["--json-schema", "/no/such/file"], "/no/such/file: No such file"),
    (["--json-schema", '{"type": "text"}'], "json_schema cannot be used: "),
    (["--json-schema", "{}", "--regex", "a"], "json_schema and regex are both given; "),
]


@pytest.mark.parametrize(("argv", "said"), BAD, ids=lambda value: str(value)[:40])
def test_bad_options(argv, said, capsys):
    """A traceback, several lines or an exit status that says that all is well."""
    try:
        status = main(["To be", "--max-tokens", "2", *argv])
    except SystemExit as e:
        status = e.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {said}") and err.count("\n") == 1 and len(err) < 300
