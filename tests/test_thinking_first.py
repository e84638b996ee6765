"""A constrained reply in which a model may think first, where `<think>` is a token of its own."""

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.grammar import Grammar
from engine.llm import BUILT_IN
from engine.thinking import CLOSE, OPEN, opening_id
from engine.tokenizer import Tokenizer

TEMPLATE = (
    "{{ messages[-1].content }}\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Who?"}]
NAME = {"enum": ["Romeo", "Juliet"]}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """The built-in model, with the tags as tokens, as Qwen3 has them."""
    path = tmp_path_factory.mktemp("tagged") / "m"
    shutil.copytree(BUILT_IN, path, ignore=shutil.ignore_patterns("__*"))
    raw = json.loads((path / "tokenizer.json").read_text())
    last = max(raw["added_tokens"], key=lambda token: token["id"])
    for i, content in enumerate((OPEN, CLOSE), last["id"] + 1):
        raw["added_tokens"].append(last | {"id": i, "content": content, "special": False})
    (path / "tokenizer.json").write_text(json.dumps(raw))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module", params=[0, 5])
def llm(request, path) -> LLM:
    return LLM(path, lookup=request.param)


def asked(llm: LLM, thinks: bool, **params) -> SamplingParams:
    """Of a model that thinks, and never stops, or one that does not."""
    bias = {llm.tokenizer.added_ids[OPEN]: 100 if thinks else -100}
    return SamplingParams(max_tokens=40, seed=1, logit_bias=bias, **params)


@pytest.mark.parametrize("constraint", [{"json_schema": NAME}, {"regex": '"[a-z]{3}"'}])
@pytest.mark.parametrize("thinks", [True, False])
def test_thoughts_are_free_and_the_answer_is_not(constraint, thinks, llm):
    """A model that thinks is made to answer without; its thoughts have to be JSON; or an answer
    behind them need not."""
    params = asked(llm, thinks, thinking_budget=3, **constraint)
    for done in (
        llm.chat(HELLO, params),
        *llm.chat(HELLO, SamplingParams(**vars(params) | {"n": 2})),
    ):
        assert re.fullmatch(r'"(Romeo|Juliet|[a-z]{3})"', done.text)
        assert done.reasoning == (OPEN * 3 if thinks else None)
        assert done.finish_reason == "stop"


def test_no_thoughts_where_they_have_ended(llm):
    """Thoughts of a model that was told not to think, or of a text that is no chat."""
    params = asked(llm, True, json_schema=NAME)
    for done in (llm.chat(HELLO, params, enable_thinking=False), llm.generate("Who?", params)):
        assert json.loads(done.text) in NAME["enum"] and done.reasoning is None


def test_a_budget_leaves_a_constrained_text_alone(llm):
    """A close tag that is forced into an answer which spells `<think>`: an error."""
    params = asked(llm, False, thinking_budget=0, regex="<think>[ab]{9}")
    assert re.fullmatch("<think>[ab]{9}", llm.tokenizer.decode(llm.chat(HELLO, params).token_ids))


def test_thoughts_do_not_end_a_reply(llm):
    """No answer, of a model that would end its reply amid its thoughts, called a complete one."""
    ids = llm.tokenizer.added_ids
    bias = {ids[OPEN]: 50, ids[CLOSE]: 80} | dict.fromkeys(llm.eos_ids, 100)
    params = SamplingParams(max_tokens=40, logit_bias=bias, json_schema=NAME)
    done = llm.chat(HELLO, params)
    assert json.loads(done.text) in NAME["enum"] and done.finish_reason == "stop"


def test_where_a_block_may_begin(path, llm):
    """A tag that is only text, or a block that has ended, taken for one that may begin."""
    tokenizer, own = llm.tokenizer, llm.tokenizer.added_ids[OPEN]
    for prompt, wanted in (
        ("Hi\n", own),
        (f"{OPEN}\n\n{CLOSE}\n\n", None),
        (CLOSE, None),
        (f"{CLOSE} Hi\n", own),
        ("", own),
    ):
        assert opening_id(tokenizer, tokenizer.encode(prompt)) == wanted
    assert opening_id(Tokenizer.from_dir(BUILT_IN), [1]) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2000), max_size=6), st.booleans())
def test_only_the_first_token_opens(thoughts, newline):
    """A block amid an answer, or a second one; a copy that shares how far it has come."""
    tokenizer, opens, closes = Tokenizer.from_dir(BUILT_IN), 2046, 2047
    a, b = (tokenizer.encode(c)[0] for c in "ab")
    params = SamplingParams(regex="ab?")

    def allowed(grammar: Grammar) -> set[int]:
        bits = grammar.allowed()
        return {i for i in (a, b, opens, closes) if bits[i // 32] >> i % 32 & 1}

    grammar = Grammar.of(params, tokenizer, 2176, [2045], (closes,), opens)
    assert allowed(grammar) == {a, opens} and not grammar.is_finished
    plain = grammar.copy()
    plain.take(a)
    assert allowed(plain) == {b}
    grammar.take(opens)
    for token in thoughts:
        grammar.take(token)
        assert grammar.is_free and not grammar.is_finished
    grammar.take(closes)
    if newline:
        grammar.take(tokenizer.encode("\n")[0])
    assert allowed(grammar) == {a}
    grammar.take(a)
    assert allowed(grammar) == {b}


def test_nothing_to_say_but_thoughts():
    """A text that has to be empty ends before the thoughts that may come first."""
    tokenizer = Tokenizer.from_dir(BUILT_IN)
    grammar = Grammar.of(SamplingParams(regex=""), tokenizer, 2176, [2045], (2047,), 2046)
    assert not grammar.is_finished
    grammar.take(2045)
    assert grammar.is_finished
