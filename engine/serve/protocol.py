"""What a client asks, in OpenAI's words -> a Call: prompts in ids, params, how to answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.config import show
from engine.llm import LLM
from engine.sampler import SamplingParams
from engine.serve.body import field, needed
from engine.serve.errors import wrong
from engine.serve.sampling import checked, constrained, sampling_of
from engine.serve.tools import ToolCallSplitter, WholeCall
from engine.thinking import ThinkingSplitter

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED = {"self", "tokenizer", "messages", "tools", "add_generation_prompt"}
COMPLETION_TOKENS = 16  # OpenAI's, where a completion does not say
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class Call:
    """What a request comes down to."""

    prompts: list[list[int]]  # n samples of each
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False  # behind a stream
    # in a chat: whether the prompt ends inside of the model's thoughts; None: all is answer
    thinks: bool | None = None
    tools: str = "none"  # "auto": calls are looked for; "required": the text is one

    @property
    def n_samples(self) -> int:
        return len(self.prompts) * self.params.n

    def splitter(self) -> ThinkingSplitter | None:
        return None if self.thinks is None else ThinkingSplitter(self.thinks)

    def tool_splitter(self) -> ToolCallSplitter | WholeCall | None:
        return {"auto": ToolCallSplitter, "required": WholeCall}.get(self.tools, lambda: None)()


def chat_call(llm: LLM, body: dict, most: int) -> Call:
    """The call that the body of /v1/chat/completions is; ApiError names what is wrong in it.

    most: how many samples it may ask for.
    """
    if llm.chat_template is None:
        raise wrong("the model has no chat template: it continues text, at /v1/completions")
    stream, include_usage = stream_of(body)
    params = sampling_of(llm, body, max_tokens=None)
    check_samples(params.n, most)
    top = checked("top_logprobs", field_or(body, "top_logprobs", 0), 0, MAX_LOGPROBS)
    if field(body, "logprobs", bool, False):
        params = replace(params, logprobs=top)
    elif top:
        raise wrong("top_logprobs needs logprobs to be true", "top_logprobs")
    messages = messages_of(body)
    tools = tools_of(body)
    mode, choices = tool_choice_of(body, tools)
    if mode == "required":
        params = constrained(params, any_call(choices), "tool_choice")
    schema = schema_of(body)
    if schema is not None:
        if mode == "required":
            raise wrong("response_format and a tool_choice that forces a call exclude each other")
        params = constrained(params, schema, "response_format")
    arguments = dict(field(body, "chat_template_kwargs", dict, {}))
    if reserved := sorted(RESERVED & arguments.keys()):
        name = "chat_template_kwargs"
        raise wrong(f"{name} has {show(reserved[0])}, which is not the template's", name)
    if schema is not None or mode == "required":
        arguments = {"enable_thinking": False} | arguments  # JSON from the first token on
    if mode != "none":
        arguments["tools"] = tools
    try:
        ids, splitter = llm.chat_prompt(messages, **arguments)
    except ValueError as e:
        raise wrong(str(e), "messages") from None
    ids = fitting(llm, ids, "messages")
    return Call([ids], params, stream, include_usage, splitter.opened, mode)


def completion_call(llm: LLM, body: dict, most: int) -> Call:
    """The call that the body of /v1/completions is, as `chat_call`."""
    stream, include_usage = stream_of(body)
    params = sampling_of(llm, body, COMPLETION_TOKENS)
    if body.get("logprobs") is not None:
        top = checked("logprobs", body["logprobs"], 0, MAX_LOGPROBS)
        params = replace(params, logprobs=top)
    if field(body, "echo", bool, False):
        raise wrong("echo is not implemented: the prompt is not sent back", "echo")
    if field(body, "suffix", str, ""):
        raise wrong("suffix is not implemented: text is continued, not filled in", "suffix")
    if field_or(body, "best_of", params.n) != params.n:
        raise wrong(f"best_of is {show(body['best_of'])}; only n, {params.n}, will do", "best_of")
    schema = schema_of(body)
    if schema is not None:
        params = constrained(params, schema, "response_format")
    prompts = prompts_of(body)
    check_samples(len(prompts) * params.n, most)  # before there is work with each
    ids = [fitting(llm, prompt, "prompt") for prompt in prompts]
    return Call(ids, params, stream, include_usage)


def check_samples(n: int, most: int) -> None:
    if n > most:
        raise wrong(f"the request asks for {n} samples; at most {most} are possible", "n")


def stream_of(body: dict) -> tuple[bool, bool]:
    """(stream, whether usage follows it)."""
    stream = field(body, "stream", bool, False)
    options = field(body, "stream_options", dict)
    if options is not None and not stream:
        raise wrong("stream_options is for requests with stream true", "stream_options")
    return stream, field(options or {}, "include_usage", bool, False, "stream_options.")


def messages_of(body: dict) -> list[dict]:
    """The conversation; what a template would pass over without a word is refused."""
    messages = needed(body, "messages", list)
    if not messages:
        raise wrong("messages is empty; a message is needed", "messages")
    return [message_of(message, f"messages[{i}]") for i, message in enumerate(messages)]


def message_of(message: object, where: str) -> dict:
    if not isinstance(message, dict):
        raise wrong(f"{where} is {show(message)}; an object is needed", where)
    role = needed(message, "role", str, f"{where}.")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise wrong(f"{where}.role is {show(role)}; one of {known} is needed", f"{where}.role")
    if message.get("content") is None and role != "assistant":
        raise wrong(f"{where}.content is missing; a text is needed", f"{where}.content")
    if role == "developer":  # OpenAI's newer name
        return message | {"role": "system"}
    return message


def tools_of(body: dict) -> list[dict]:
    """The functions a model may call."""
    tools = field(body, "tools", list, [])
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise wrong(f"{where} is {show(tool)}; a tool of type function is needed", where)
        function = needed(tool, "function", dict, f"{where}.")
        needed(function, "name", str, f"{where}.function.")
        field(function, "parameters", dict, None, f"{where}.function.")
    return tools


def tool_choice_of(body: dict, tools: list[dict]) -> tuple[str, list[dict]]:
    """("none" | "auto" | "required", the functions to choose from)."""
    choice = body.get("tool_choice")
    functions = [tool["function"] for tool in tools]
    if choice is None:
        return ("auto" if tools else "none"), functions
    if choice in ("none", "auto"):
        return (choice if tools else "none"), functions
    if choice != "required":
        if not isinstance(choice, dict) or choice.get("type") != "function":
            needed_ = "none, auto, required or a function is needed"
            raise wrong(f"tool_choice is {show(choice)}; {needed_}", "tool_choice")
        named = needed(choice, "function", dict, "tool_choice.")
        name = needed(named, "name", str, "tool_choice.function.")
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise wrong(f"tool_choice names {show(name)}, which is not in tools", "tool_choice")
    if not functions:
        raise wrong("tool_choice is 'required'; tools to choose from are needed", "tool_choice")
    return "required", functions


def any_call(functions: list[dict]) -> dict:
    """The JSON schema of a call of one of these."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def schema_of(body: dict) -> dict | None:
    """The JSON schema that the text must be of; None: it may be anything."""
    name = "response_format"
    wanted = field(body, name, dict, {"type": "text"})
    match wanted.get("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            about = needed(wanted, "json_schema", dict, f"{name}.")
            return needed(about, "schema", dict, f"{name}.json_schema.")
    kinds = "text, json_object or json_schema is needed"
    raise wrong(f"{name}.type is {show(wanted.get('type'))}; {kinds}", f"{name}.type")


def prompts_of(body: dict) -> Sequence[str | list[int]]:
    """One prompt, a text or ids, or several."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompts = prompt
    else:
        prompts = [prompt]
    for one in prompts:
        if not isinstance(one, str | list):
            raise wrong(f"prompt is {show(prompt)}; text or token ids are needed", "prompt")
    return prompts


def fitting(llm: LLM, prompt: str | list, param: str) -> list[int]:
    """A prompt's ids, if there is room behind them; 400 with both numbers."""
    try:
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if len(ids) >= llm.context:
            raise wrong(
                f"the prompt is {len(ids)} tokens long, the context {llm.context}: "
                "there is no room for a token to follow",
                param,
                "context_length_exceeded",
            )
        return llm.requests.ids_of(ids)
    except ValueError as e:
        raise wrong(str(e), param) from None


def field_or(body: dict, name: str, default):
    return default if body.get(name) is None else body[name]
