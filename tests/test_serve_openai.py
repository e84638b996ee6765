"""The server as the unmodified `openai` package uses it: answers, streams, errors, cancels."""

from __future__ import annotations

import asyncio
import json
import math

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from openai_types import Sent, faults
from pydantic import BaseModel, Field
from serving import Scripted, chat_model, served, until

from engine.llm import LLM
from engine.sampler import SamplingParams
from engine.serve import protocol
from engine.serve.server import Limits
from engine.serve.service import Service

HI = [{"role": "user", "content": "To be, or not to be?"}]
GREEDY = {"temperature": 0, "max_tokens": 8}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return LLM(chat_model(tmp_path_factory.mktemp("serve") / "tiny"), kv_cache="paged")


@pytest.fixture(scope="module")
def sent() -> Sent:
    """What the servers below have sent, and what is wrong with it."""
    return Sent()


@pytest.fixture(autouse=True)
def all_is_of_openais_types(sent):
    """Each answer, chunk and error of each test, to the last field: the client's own parser takes
    nearly anything."""
    sent.faults.clear()
    yield
    assert sent.faults == []


@pytest.fixture(scope="module")
def client(llm, sent):
    """A client of a server with the model itself behind it."""
    service = Service(llm)
    with served(llm, service, within=sent.checked) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    service.close()


@pytest.fixture
def scripted(llm, sent):
    """A server that says what a test wants: (script, client)."""
    script = Scripted()
    with served(llm, script, within=sent.checked) as address:
        yield script, openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def told(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    """The text of one choice of a stream."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


# ---------------------------------------------------------------- the model itself


def test_chat(llm, client):
    """A chat that is not what the engine itself answers, or usage that does not add up."""
    answer = client.chat.completions.create(model="any", messages=HI, **GREEDY)
    (choice,) = answer.choices
    expected = llm.chat(HI, SamplingParams(**GREEDY))
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant" and choice.finish_reason == expected.finish_reason
    assert answer.object == "chat.completion" and answer.model == "tiny"
    usage = answer.usage
    assert usage.prompt_tokens == expected.metrics.prompt_tokens
    assert usage.completion_tokens == len(expected.token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_stream_is_the_same_answer(client):
    """A stream whose chunks say something else than the whole answer, or in another form."""
    whole = client.chat.completions.create(model="", messages=HI, **GREEDY)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="", messages=HI, **GREEDY, **options))
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    assert told(chunks) == whole.choices[0].message.content
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices[0].delta.content is None
    assert usage.choices == [] and usage.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_stream_without_usage(client):
    """A chunk without choices where nobody asked for it breaks `chunk.choices[0]`."""
    chunks = list(client.chat.completions.create(model="", messages=HI, stream=True, **GREEDY))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_cached_tokens(client):
    """A prompt whose beginning was computed before, and nobody is told."""
    messages = [{"role": "user", "content": "Once more unto the breach, dear friends, once more;"}]
    answers = [client.chat.completions.create(model="", messages=messages, **GREEDY) for _ in "ab"]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert 0 <= cached[0] < cached[1] < answers[0].usage.prompt_tokens


@pytest.mark.parametrize("thinking", [None, True, False])
def test_a_second_turn(llm, client, thinking):
    """Every turn of a conversation read again from its beginning, where only its end is new; or
    rows taken for known behind the place where a template writes the past in another way."""
    asked = {"model": "", "extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}}}
    first = [{"role": "user", "content": f"Once more unto the breach, dear friends: {thinking}"}]
    answer = client.chat.completions.create(messages=first, **asked, **GREEDY)
    past = {"role": "assistant", "content": answer.choices[0].message.content}
    second = [*first, past, {"role": "user", "content": "Or close the wall up"}]
    prompts = [llm.chat_prompt(turn, enable_thinking=thinking)[0] for turn in (first, second)]
    pairs = enumerate(zip(*prompts, strict=False))
    common = next((i for i, (a, b) in pairs if a != b), len(prompts[0]))
    answer = client.chat.completions.create(messages=second, **asked, **GREEDY)
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached == common // 16 * 16 > 0


def test_completions(llm, client):
    """A text, ids, several of each: choices in the wrong order, or another prompt's."""
    texts = ["To be", "Now is the winter"]
    expected = [llm.generate(text, SamplingParams(**GREEDY)).text for text in texts]
    ids = [llm.tokenizer.encode(text) for text in texts]
    for prompt, n in ((texts[0], 1), (ids[0], 1), (texts, 2), (ids, 2)):
        answer = client.completions.create(model="", prompt=prompt, **GREEDY)
        assert [choice.text for choice in answer.choices] == expected[:n]
        assert [choice.index for choice in answer.choices] == list(range(n))
        assert answer.usage.prompt_tokens == sum(map(len, ids[:n]))
    chunks = list(client.completions.create(model="", prompt=texts, stream=True, **GREEDY))
    for i, text in enumerate(expected):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == i]
        assert "".join(choice.text for choice in mine) == text
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    assert len(client.completions.create(model="", prompt="To").choices[0].text) > 16  # 16 tokens


def test_logprobs_of_a_chat(client):
    """Logprobs that do not belong to the tokens, or that a stream loses."""
    asked = {"model": "", "messages": HI, "logprobs": True, "top_logprobs": 3, **GREEDY}
    answer = client.chat.completions.create(**asked)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        assert len(entry.top_logprobs) == 3
        top = max(entry.top_logprobs, key=lambda other: other.logprob)
        assert (top.token, top.logprob) == (entry.token, entry.logprob) and entry.logprob <= 0
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    chunks = list(client.chat.completions.create(stream=True, **asked))
    given = [chunk.choices[0].logprobs for chunk in chunks]
    assert [entry for logprobs in given if logprobs for entry in logprobs.content] == content
    asked["top_logprobs"] = None
    content = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in content)


def test_logprobs_of_a_completion(client):
    """Offsets that point beside the tokens; the chosen token missing among the likeliest."""
    asked = {"model": "", "prompt": "To be", "seed": 3, "max_tokens": 6, "logprobs": 2}
    answer = client.completions.create(**asked)
    text, told = answer.choices[0].text, answer.choices[0].logprobs
    for token, at, logprob, top in zip(
        told.tokens, told.text_offset, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert text[at:].startswith(token) and top[token] == logprob and 2 <= len(top) <= 3
        assert math.isfinite(logprob)
    chunks = [
        chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **asked)
    ]
    assert [token for logprobs in chunks for token in logprobs.tokens] == told.tokens
    assert [at for logprobs in chunks for at in logprobs.text_offset] == told.text_offset


def test_stop(client):
    """Text behind a stop string that is sent all the same."""
    whole = client.completions.create(model="", prompt="To be", **GREEDY).choices[0].text
    cut = whole[4:7]
    for stop in (cut, [cut, "never"]):
        answer = client.completions.create(model="", prompt="To be", stop=stop, **GREEDY)
        assert answer.choices[0].text == whole[: whole.index(cut)]
        assert answer.choices[0].finish_reason == "stop"


def test_stop_of_a_chat(client):
    """A stop string that a stream has begun to send before it is whole, or that only completions
    look at."""
    asked = {"model": "", "messages": HI, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    cut = whole[5:9]
    answer = client.chat.completions.create(stop=cut, **asked)
    assert answer.choices[0].message.content == whole[: whole.index(cut)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(stop=cut, stream=True, **asked))
    assert told(chunks) == whole[: whole.index(cut)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_usage_of_streamed_completions(client):
    """Tokens of several prompts and samples that are counted once, or not at all."""
    asked = {"model": "", "prompt": ["To be", "Now is the winter"], "n": 2, "seed": 5}
    whole = client.completions.create(max_tokens=6, **asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(max_tokens=6, **asked, **options)
    assert last.choices == [] and all(chunk.usage is None for chunk in chunks)
    same = "prompt_tokens", "completion_tokens", "total_tokens"
    assert [getattr(last.usage, n) for n in same] == [getattr(whole.usage, n) for n in same]
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_seed_and_n(client):
    """Samples of one seed that are all the same, or that change from run to run."""

    def texts(seed: int | None, n: int = 3) -> list[str]:
        asked = {"model": "", "messages": HI, "max_tokens": 12, "seed": seed, "n": n}
        answer = client.chat.completions.create(**asked)
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.message.content for choice in answer.choices]

    first = texts(7)
    assert texts(7) == first and len(set(first)) == 3
    assert texts(8) != first
    assert len(set(texts(None))) == 3
    chunks = list(
        client.chat.completions.create(
            model="", messages=HI, max_tokens=12, seed=7, n=3, stream=True
        )
    )
    assert [told(chunks, i) for i in range(3)] == first


def test_sampling_fields(llm, client):
    """A field that is read and then forgotten."""
    ids = llm.tokenizer.encode(" king")
    asked = {"model": "", "prompt": "To be", "temperature": 0, "max_tokens": 3}
    plain = client.completions.create(**asked).choices[0].text
    bias = client.completions.create(logit_bias={str(ids[0]): 100}, **asked).choices[0].text
    assert bias == " king" * 3
    extra = {"top_k": 1, "min_p": 0.5, "repetition_penalty": 1.5, "user": "me", "unknown": {}}
    hot = asked | {"temperature": 50}
    assert client.completions.create(extra_body={"top_k": 1}, **hot).choices[0].text == plain
    given = client.completions.create(extra_body=extra, presence_penalty=1, top_p=0.5, **asked)
    same = {
        "presence_penalty": 1,
        "top_p": 0.5,
        "top_k": 1,
        "min_p": 0.5,
        "repetition_penalty": 1.5,
    }
    params = SamplingParams(temperature=0, max_tokens=3, **same)
    assert given.choices[0].text == llm.generate("To be", params).text


def test_models(client):
    """Clients that look for the model before they ask it."""
    (model,) = client.models.list()
    assert client.models.retrieve(model.id) == model and model.id == "tiny"
    with pytest.raises(openai.NotFoundError) as e:
        client.models.retrieve("gpt-4")
    assert e.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"temperature": -1}, "temperature", "temperature is -1; a number at least 0"),
        ({"temperature": "hot"}, "temperature", "'hot'"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"max_tokens": 0}, "max_tokens", "at least 1 and at most 2048"),
        ({"max_tokens": 10**30}, "max_tokens", "at most 2048"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "a whole number"),
        ({"n": 129}, "n", "at most 128"),
        ({"n": 100}, "n", "asks for 100 samples; at most 64"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": [1]}, "stop", "a string"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"logprobs": 3}, "logprobs", "true or false"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "at most 2175"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "at most 100"),
        ({"stream_options": {}}, "stream_options", "stream"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": "Hi"}, "messages", "a list"),
        ({"messages": [1]}, "messages[0]", "an object"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "'king'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text"),
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, "messages", "the context 2048"),
        ({"tools": [{"type": "code"}]}, "tools[0]", "type function"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "'maybe'"),
        ({"tool_choice": "required"}, "tool_choice", "tools to choose from"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "'f', which is not in tools",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs", "tools"),
        ({"extra_body": {"model": 3}}, "model", "a text"),
    ],
    ids=str,
)
def test_wrong_values(client, changes, param, said):
    """A wrong value that is taken for a right one, or refused without a word about which."""
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(**{"model": "", "messages": HI, "max_tokens": 1} | changes)
    assert e.value.param == param and said in e.value.body["message"]
    assert e.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ["To", 3]}, "token ids"),
        ({"prompt": [[1], []]}, "the prompt is empty"),
        ({"prompt": [99999]}, "outside 0 to 2175"),
        ({"prompt": [True]}, "outside 0 to 2175"),
        ({"prompt": [1] * 2048}, "2048 tokens long, the context 2048"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"extra_body": {"prompt": None}}, "token ids"),
    ],
    ids=str,
)
def test_wrong_completions(client, changes, said):
    """What a completion cannot do, done by halves."""
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(**{"model": "", "prompt": "To", "max_tokens": 1} | changes)


def test_a_full_context(llm, client):
    """The last token there is room for refused, or one more than there is room for."""
    ids = [1] * (llm.context - 2)
    asked = {"ignore_eos": True}
    answer = client.completions.create(model="", prompt=ids, max_tokens=50, extra_body=asked)
    assert answer.usage.completion_tokens == 2 and answer.choices[0].finish_reason == "length"


# ---------------------------------------------------------------- a text that a test wants


def test_tool_calls(scripted):
    """Calls left in the text, arguments that are no JSON text, or a finish_reason of stop."""
    script, client = scripted
    script.text = f"Let me see.\n\n{CALL}\n{CALL}"
    asked = {"model": "", "messages": HI, "tools": [TOOL]}
    answer = client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    for call in choice.message.tool_calls:
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Zürich"}
    assert len({call.id for call in choice.message.tool_calls}) == 2

    with client.chat.completions.stream(**asked) as stream:  # the client's own accumulator
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    calls = [(c.function.name, c.function.arguments) for c in final.choices[0].message.tool_calls]
    assert calls == [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert final.choices[0].message.content == "Let me see."
    list(client.chat.completions.create(stream=True, **asked))


def test_tool_calls_only_where_there_are_tools(scripted):
    """Text that speaks of calls, cut out of an answer to somebody who has no tools."""
    script, client = scripted
    script.text = CALL
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        answer = client.chat.completions.create(model="", messages=HI, **more)
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.tool_calls is None


def test_a_conversation_with_tools(llm, scripted):
    """A tool's answer, or the call before it, that the model never sees."""
    script, client = scripted
    script.text = CALL
    answer = client.chat.completions.create(model="", messages=HI, tools=[TOOL])
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    client.chat.completions.create(model="", messages=[*HI, message, result], tools=[TOOL])
    prompt = llm.tokenizer.decode(script.requests[-1].ids)
    assert "tool: sunny" in prompt and '"weather"' in prompt


def test_reasoning(scripted):
    """Thoughts in the answer, or an answer in the thoughts."""
    script, client = scripted
    script.text = "<think>\nHm.\n</think>\n\nYes."
    asked = {"model": "", "messages": HI}
    message = client.chat.completions.create(**asked).choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
    chunks = list(client.chat.completions.create(stream=True, **asked))
    thoughts = [getattr(c.choices[0].delta, "reasoning_content", None) for c in chunks]
    assert "".join(filter(None, thoughts)) == "Hm." and told(chunks) == "Yes."
    script.text = "Hm.\n</think>\n\nYes."  # where the prompt has opened the block
    more = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = client.chat.completions.create(**asked, **more).choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
    script.text = "Yes."
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.content == "Yes." and not hasattr(message, "reasoning_content")


def test_developer_is_system(llm, scripted):
    """OpenAI's newer name for the system, which templates pass over without a word."""
    script, client = scripted
    client.chat.completions.create(
        model="", messages=[{"role": "developer", "content": "Rhyme."}, *HI]
    )
    assert llm.tokenizer.decode(script.requests[0].ids).startswith("system: Rhyme.")


def test_constraints_with_the_model(client):
    """JSON promised, and any text sent; a schema that cannot be used and is dropped."""
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    own = {"type": "object", "properties": {"a": number}, "required": ["a"]}
    own["additionalProperties"] = False

    def asked(**changes):
        return client.chat.completions.create(model="", messages=HI, max_tokens=300, **changes)

    about = {"type": "json_schema", "json_schema": {"name": "x", "schema": own}}
    for stream in (False, True):
        answer = asked(response_format=about, stream=stream, seed=1)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
        assert 0 <= json.loads(text)["a"] <= 99
    (choice,) = asked(tools=[TOOL], tool_choice="required", seed=2).choices
    if choice.finish_reason == "tool_calls":
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        assert isinstance(json.loads(call.function.arguments), dict)
    else:
        assert choice.finish_reason == "length"
    about["json_schema"]["schema"] = {"type": "object", "$ref": "http://example.invalid/x"}
    with pytest.raises(openai.BadRequestError, match="json_schema"):
        asked(response_format=about)


def test_a_text_of_a_pydantic_model(client):
    """The schema that the client makes of a class, refused, or an answer that is none of it."""

    class Scene(BaseModel):
        act: int = Field(ge=1, le=5)
        ghost: bool

    asked = {"model": "", "messages": HI, "max_tokens": 300, "seed": 3}
    answer = client.chat.completions.parse(response_format=Scene, **asked)
    assert 1 <= answer.choices[0].message.parsed.act <= 5
    with client.chat.completions.stream(response_format=Scene, **asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_constraints_are_passed_on(scripted, monkeypatch):
    """A schema that never reaches the sampler; a forced call left as text."""
    script, client = scripted
    schemas = []

    def constrained(params, schema, what):
        schemas.append(schema)
        return params

    monkeypatch.setattr(protocol, "constrained", constrained)
    own = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": own, "strict": True}}
    for response_format in (wanted, {"type": "json_object"}, {"type": "text"}):
        client.chat.completions.create(model="", messages=HI, response_format=response_format)
    assert schemas == [own, {"type": "object"}]
    script.text = '{"name": "weather", "arguments": {"city": "Paris"}}'
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        asked = {"model": "", "messages": HI, "tools": [TOOL], "tool_choice": choice}
        (answer,) = client.chat.completions.create(**asked).choices
        assert answer.message.content is None and answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls[0].function.name == "weather"
        assert schemas[-1]["properties"]["name"] == {"const": "weather"}


# ---------------------------------------------------------------- what goes wrong


def test_a_full_queue(scripted):
    """Work piled up without end, or a client not told to come again."""
    script, client = scripted
    script.full = True
    with pytest.raises(openai.RateLimitError, match="3 requests wait") as e:
        client.chat.completions.create(model="", messages=HI, stream=True)
    assert int(e.value.response.headers["retry-after"]) >= 1


def test_a_full_queue_is_asked_again(scripted):
    """A client that gives up, though it was told when to come again."""
    script, client = scripted
    script.text, script.full = "Yes.", True
    submit = script.submit

    def once(*args, **more):
        try:
            return submit(*args, **more)
        finally:
            script.full = False

    script.submit = once
    patient = client.with_options(max_retries=1)
    answer = patient.chat.completions.create(model="", messages=HI)
    assert answer.choices[0].message.content == "Yes." and len(script.requests) == 1


def test_part_of_the_samples_finds_room(scripted):
    """The first samples of a refused request that go on for nobody."""
    script, client = scripted
    script.text, script.hold = "abc", 0
    submit = script.submit

    def twice(*args, **more):
        script.full = len(script.requests) == 2
        return submit(*args, **more)

    script.submit = twice
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="", messages=HI, n=3)
    assert len(script.requests) == 2 and all(r.cancelled.is_set() for r in script.requests)


def test_keys_and_limits(llm, sent):
    """A refusal that the client takes for another kind of error."""
    limits = Limits(body_bytes=1000)
    options = {"api_key": "k", "limits": limits, "within": sent.checked}
    with served(llm, Scripted("Yes."), **options) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0)
        assert client.chat.completions.create(model="", messages=HI).choices[0].message.content
        for call in (
            client.with_options(api_key="wrong").models.list,
            lambda: client.with_options(api_key="wrong").completions.create(model="", prompt="To"),
        ):
            with pytest.raises(openai.AuthenticationError) as e:
                call()
            assert e.value.code == "invalid_api_key"
        with pytest.raises(openai.APIStatusError, match="1000 bytes") as e:
            client.completions.create(model="", prompt="x" * 1000)
        assert e.value.status_code == 413
        foreign = {"Origin": "https://evil.org"}
        with pytest.raises(openai.PermissionDeniedError):
            client.models.list(extra_headers=foreign)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="", input="x")


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_own_timeout(scripted, stream):
    """A request that runs on when its client has lost patience, before a word or after some."""
    script, client = scripted
    script.text, script.hold = "Once upon a time", 2 if stream else 0
    hasty = client.with_options(timeout=0.5)
    # an error of the package it has its connections of, where it has begun to stream
    with pytest.raises(Exception if stream else openai.APITimeoutError) as e:
        answer = hasty.chat.completions.create(model="", messages=HI, stream=stream)
        for _ in answer:
            pass
    assert "timed out" in str(e.value)
    until(lambda: all(request.cancelled.is_set() for request in script.requests))


def test_timeout(llm, sent):
    """A request that takes for ever; one whose client is told that all is well."""
    script = Scripted("Once upon a time", hold=2)
    limits = Limits(seconds=0.2)
    with served(llm, script, limits=limits, within=sent.checked) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        with pytest.raises(openai.InternalServerError, match="longer than 0.2 s") as e:
            client.chat.completions.create(model="", messages=HI)
        assert e.value.status_code == 504 and len(script.requests) == 1  # not tried again
        chunks = []
        with pytest.raises(openai.APIError, match="longer than 0.2 s"):
            for chunk in client.chat.completions.create(model="", messages=HI, stream=True):
                chunks.append(chunk)
        assert told(chunks) == "Once u"


def test_the_engine_fails(scripted):
    """A traceback sent to the client, or a request that hangs when the engine fails."""
    script, client = scripted
    script.text, script.ends = "abc", "error"
    for error, said in (
        (ValueError("the logits are not finite"), "on this request: the logits are not finite"),
        (KeyError("secret"), "the engine failed on this request"),
    ):
        script.error = error
        with pytest.raises(openai.InternalServerError, match=said) as e:
            client.chat.completions.create(model="", messages=HI)
        assert e.value.status_code == 500 and "secret" not in str(e.value)
        with pytest.raises(openai.APIError, match=said):
            list(client.chat.completions.create(model="", messages=HI, stream=True))


def test_cancel_of_a_stream(scripted):
    """A closed stream whose request runs to its end."""
    script, client = scripted
    script.text, script.hold = "Once upon a time", 2
    stream = client.chat.completions.create(model="", messages=HI, stream=True, n=2)
    for _, chunk in zip(range(4), stream, strict=False):
        assert chunk.choices
    stream.close()
    until(lambda: all(request.cancelled.is_set() for request in script.requests))
    assert len(script.requests) == 2


def test_cancel_of_a_task(scripted):
    """A task that is cancelled, or a block of `async with` that is left, whose request runs on."""
    script, client = scripted
    script.text, script.hold = "Once upon a time", 2

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as asking:
            create = asking.chat.completions.create
            waiting = asyncio.create_task(create(model="", messages=HI))
            while not script.requests:
                await asyncio.sleep(0.005)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            text = ""
            async with await create(model="", messages=HI, stream=True) as stream:
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    if len(text) == 6:
                        return text

    assert asyncio.run(ask()) == "Once u"
    until(lambda: all(request.cancelled.is_set() for request in script.requests))
    assert len(script.requests) == 2


# ---------------------------------------------------------------- the check of what is sent


@pytest.mark.parametrize(
    ("path", "chunk", "change", "fault"),
    [
        ("/v1/chat/completions", False, {"created": "now"}, "ChatCompletion: ('created',)"),
        ("/v1/chat/completions", False, {"object": "text"}, "('object',)"),
        ("/v1/chat/completions", False, {"choices": [{}]}, "'finish_reason'"),
        ("/v1/chat/completions", False, {"more": 1}, "no field more"),
        ("/v1/chat/completions", False, {"usage": {"prompt_tokens": 1.5}}, "'prompt_tokens'"),
        ("/v1/chat/completions", True, {"choices": [{"index": 0}]}, "'delta'"),
        ("/v1/completions", True, {"choices": [{"index": 0}]}, "'text'"),
        ("/v1/completions", False, {"id": None}, "('id',)"),
        ("/v1/models/x", False, {}, "Model: ('owned_by',)"),
        ("/v1/completions", False, {"error": {"message": "no", "type": "x"}}, "error.code is"),
    ],
)
def test_faults_are_found(path, chunk, change, fault):
    """A check of all that is sent, in all tests above, that lets everything through."""
    kind = "chat.completion" if "chat" in path else "text_completion"
    kind = "chat.completion.chunk" if chunk and "chat" in path else kind
    data = {"id": "x", "object": kind, "created": 1, "model": "tiny", "choices": []}
    if "models" not in path:
        assert faults(data, path, chunk=chunk) == []
    assert any(fault in found for found in faults(data | change, path, chunk=chunk))


def test_all_is_looked_at(client, sent):
    """Answers or chunks that go past the check."""
    before = sent.n_objects
    client.completions.create(model="", prompt="To", max_tokens=1)
    assert sent.n_objects == before + 1
    chunks = list(client.chat.completions.create(model="", messages=HI, stream=True, **GREEDY))
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    assert sent.n_objects == before + 2 + len(chunks)
