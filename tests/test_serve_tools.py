"""engine/serve/tools.py: calls found in a text, however it comes in pieces, and nothing lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.serve.tools import CLOSE, OPEN, ToolCall, ToolCallSplitter, WholeCall, joined


def block(body: object) -> str:
    return f"{OPEN}\n{body if isinstance(body, str) else json.dumps(body)}\n{CLOSE}"


def split(text: str, cuts: list[int] = ()) -> list[str | ToolCall]:
    """All that comes of a text cut at some places."""
    splitter, found, places = ToolCallSplitter(), [], [0, *sorted(cuts), len(text)]
    for start, stop in zip(places[:-1], places[1:], strict=True):
        found += splitter.push(text[start:stop])
    return joined(found + splitter.flush())


WEATHER = block({"name": "weather", "arguments": {"city": "Zürich", "days": 2}})
CALL = ToolCall("weather", '{"city": "Zürich", "days": 2}')
QUOTING = block({"name": "f", "arguments": {"x": CLOSE + OPEN}})
SPELLED = {CALL: WEATHER, ToolCall("f", json.dumps({"x": CLOSE + OPEN})): QUOTING}
GRAMMAR = [OPEN, CLOSE, WEATHER, block("{}"), block("{"), "<", "<tool", '{"', '"', "\\", "}"]
GRAMMAR += [" ", "\n", "a", "é", QUOTING]
TEXTS = st.lists(st.sampled_from(GRAMMAR), max_size=12).map("".join)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (WEATHER, [CALL]),
        (f"\n\n{WEATHER}\n", [CALL]),
        (f"Let me see.\n\n{WEATHER}", ["Let me see.", CALL]),
        (f"{WEATHER}\n{WEATHER}", [CALL, CALL]),
        (f"{WEATHER}\n and more", [CALL, "\n and more"]),
        (block({"name": "now"}), [ToolCall("now", "{}")]),
        (block({"name": "f", "arguments": '{"a": 1}'}), [ToolCall("f", '{"a": 1}')]),
        (block('{"name": "f", "arguments": {"a": "x\ny"}}'), [ToolCall("f", '{"a": "x\\ny"}')]),
        (
            block({"name": "f", "arguments": {"a": f'"{CLOSE}'}}),
            [ToolCall("f", json.dumps({"a": f'"{CLOSE}'}))],
        ),
    ],
)
def test_calls(text, items):
    """A call that is missed, or layout around it that ends up in the answer."""
    assert split(text) == items


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "no call <tool_cal",
        OPEN,
        f"{OPEN}\n{{",
        WEATHER.removesuffix(CLOSE),
        block("weather in Paris"),
        block({"arguments": {}}),
        block({"name": 3, "arguments": {}}),
        block({"name": "f", "arguments": [1]}),
        block({"name": "f", "arguments": "no object"}),
        block('{"name": "f", "arguments": {"x": NaN}}'),
        block('{"name": "f", "arguments": {"x": 1e999}}'),
        block('{"name": "f", "arguments": {"x": "\\ud800"}}'),
        block('{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "}}"),
        block("[1]") + "\n" + CLOSE,
        block(json.dumps({"name": "f"}) + "}"),
    ],
)
def test_what_is_no_call_stays_text(text):
    """A model's words swallowed because they look like a call, or a crash over them."""
    assert "".join(split(text)) == text


def test_a_call_behind_a_broken_one():
    """One broken call that hides all that follow."""
    broken = f"{OPEN}\nwhat?\n"
    assert split(broken + WEATHER) == [broken.rstrip(), CALL]
    assert split(block("{") + WEATHER) == [block("{"), CALL]


@given(TEXTS, st.data())
def test_cuts_do_not_matter(text, data):
    """A tag cut between two tokens that is not seen, or sent as text in part."""
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    assert split(text, cuts) == split(text) == split(text, range(len(text)))


@given(TEXTS)
def test_nothing_is_lost(text):
    """Characters dropped, doubled or moved: all but layout at calls must come out, in order."""
    found = split(text)
    spelled = "".join(item if isinstance(item, str) else SPELLED[item] for item in found)
    assert "".join(spelled.split()) == "".join(text.split())
    if not any(isinstance(item, ToolCall) for item in found):
        assert spelled == text


@given(st.text(max_size=30))
def test_text_is_not_held_back(text):
    """An answer that waits for its end though no call has begun: a stream that does not flow."""
    splitter = ToolCallSplitter()
    sent = "".join(splitter.push(text + "."))
    assert sent == text + "." or OPEN.startswith(text[len(sent) :].lstrip()) or OPEN in text


def test_a_whole_text_as_a_call():
    """A call that the text is constrained to be, cut short: then it is text."""
    for text, found in (
        ('{"name": "f", "arguments": {"a": 1}}', [ToolCall("f", '{"a": 1}')]),
        ('{"name": "f", "arg', ['{"name": "f", "arg']),
        ("", []),
    ):
        splitter = WholeCall()
        assert splitter.push(text[:7]) == splitter.push(text[7:]) == []
        assert splitter.flush() == found
