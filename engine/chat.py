"""Messages -> the text and the ids of a prompt.

A template is a program that comes with the weights. It runs in jinja2's sandbox on copies of plain
data, so that it reaches nothing of this process; how long it may run is not limited.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2 import ext, nodes, sandbox

from engine.config import read_json, show
from engine.thinking import CLOSE, OPEN
from engine.tokenizer import StandIns, Tokenizer, refuse_surrogates

SPECIAL_TOKENS = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # what a message's are called, by clients
NO_THOUGHTS = re.compile(rf"{OPEN}\s*{CLOSE}\s*\Z")  # a prompt's end, where none are wanted


class GenerationTag(ext.Extension):
    """`{% generation %}`, around what an assistant says: its body, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def raise_exception(message):
    raise jinja2.TemplateError(str(message))


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    layout = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


# What transformers 5 (utils/chat_template_utils.py) offers a template.
ENVIRONMENT = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
)
ENVIRONMENT.filters["tojson"] = tojson  # jinja2's own escapes HTML
ENVIRONMENT.globals["raise_exception"] = raise_exception
ENVIRONMENT.globals["strftime_now"] = lambda format: datetime.now().strftime(format)


@dataclass(frozen=True)
class ChatTemplate:
    """A checkpoint's chat template. Renders the same text as transformers 5, to the character."""

    _templates: dict[str, jinja2.Template]  # "default", and in some models "tool_use"
    _tokens: dict[str, str]  # variables such as eos_token
    _thinks: bool  # the template knows of thoughts

    @classmethod
    def from_dir(cls, path: Path) -> ChatTemplate | None:
        """The template of checkpoint directory `path`, None if it has none.

        From chat_template.jinja, else from tokenizer_config.json. ValueError, in one line, names
        the file that cannot be used.
        """
        file, config_file = path / "chat_template.jinja", path / "tokenizer_config.json"
        config = read_json(config_file) if os.path.exists(config_file) else {}
        own = os.path.exists(file)
        raw = read_text(file) if own else config.get("chat_template")
        if raw is None:
            return None
        templates = templates_of(raw, file if own else config_file)
        thinks = OPEN in json.dumps(raw)
        return cls(templates, special_tokens_of(config, config_file), thinks)

    def render(self, messages, tools=None, add_generation_prompt=True, **arguments) -> str:
        """The prompt's text. `arguments`, such as enable_thinking, are the template's variables.

        `messages` and `tools` are as in OpenAI's API. ValueError, in one line, for a message or a
        tool that is not, and for whatever goes wrong in the template.
        """
        return self._run(conversation(messages, tools, add_generation_prompt, arguments))

    def may_think(self, messages, **arguments) -> bool:
        """Whether the reply may begin with thoughts: the prompt has not ended them already."""
        return self._thinks and not NO_THOUGHTS.search(self.render(messages, **arguments))

    def encode(
        self, tokenizer: Tokenizer, messages, tools=None, add_generation_prompt=True, **arguments
    ) -> list[int]:
        """The prompt's ids: those of `render`'s text, where only the template's tokens control.

        A control token spelled in a message, a tool or an argument is text: otherwise whoever
        writes into a conversation could begin a turn in any role. What an assistant said, a model
        wrote: there, added tokens that are not marked special (`<think>`) are tokens. One that the
        template joins from its own text and a given one (`'<|' + message.role`) is its own. Where
        a template acts on a token that is only text, and how it does cannot be followed, the ids
        are of what it writes without that token.
        """
        variables = conversation(messages, tools, add_generation_prompt, arguments)
        text = self._run(variables)
        refuse_surrogates(text)
        try:
            stand_ins = StandIns(tokenizer, text + json.dumps(variables, ensure_ascii=False))
            text = self._hidden(text, variables, stand_ins)
        except RecursionError:
            raise ValueError("the messages, tools or arguments are nested too deeply") from None
        ids = []
        for piece, control in tokenizer.split(text):
            ids += tokenizer.encode_plain(stand_ins.shown(piece)) + control
        return ids

    def _hidden(self, text: str, variables: dict, stand_ins: StandIns) -> str:
        """`text`, which `variables` gave, with stand-ins for tokens that are not the template's."""
        safe = self._run(changed(variables, stand_ins.hide))
        if stand_ins.shown(safe) == text:
            return safe
        # Some templates look for tokens: Qwen3's, for a user's message that is a tool's response.
        # So they stay, with a mark beside. One cut off from its mark would be the template's.
        exact = stand_ins.hide_marked(self._run(changed(variables, stand_ins.mark)))
        all_found = stand_ins.count(exact) == stand_ins.count(safe)
        return exact if all_found and stand_ins.shown(exact) == text else safe

    def _run(self, variables: dict) -> str:
        is_tool_use = variables["tools"] is not None and "tool_use" in self._templates
        template = self._templates["tool_use" if is_tool_use else "default"]
        variables = self._tokens | variables
        try:
            try:
                return template.render(variables)
            except jinja2.UndefinedError:
                # Clients leave out the content beside tool calls; Qwen3's template needs one.
                given = variables["messages"]
                filled = [{"content": ""} | m if "tool_calls" in m else m for m in given]
                return template.render(variables | {"messages": filled})
        except Exception as e:  # a template can raise anything
            raise ValueError(f"the chat template cannot render this: {one_line(e)}") from None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def read_text(file: Path) -> str:
    if not os.path.isfile(file):
        raise ValueError(f"{file}: is not a file")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise ValueError(f"{file}: cannot be read as text ({one_line(e)})") from None


def templates_of(raw: object, file: Path) -> dict[str, jinja2.Template]:
    """`raw`: a template, or a list of {name, template}, one of them named "default"."""
    entries = [{"name": "default", "template": raw}] if isinstance(raw, str) else raw
    named = {str(e.get("name")): e.get("template") for e in entries} if are_objects(entries) else {}
    if "default" not in named or not all(isinstance(source, str) for source in named.values()):
        needed = "a text, or objects with the name and the template, one of them 'default'"
        raise ValueError(f"{file}: chat_template is {show(raw)}, not {needed}")
    try:
        return {name: ENVIRONMENT.from_string(source) for name, source in named.items()}
    except Exception as e:  # jinja2's syntax errors, and Python's of the code made from a template
        line = f" (line {e.lineno})" if isinstance(e, jinja2.TemplateSyntaxError) else ""
        raise ValueError(f"{file}: chat template cannot be used{line}: {one_line(e)}") from None


def special_tokens_of(config: dict, file: Path) -> dict[str, str]:
    """Entries such as `eos_token`: each a text, or an object with its content."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
        elif name in SPECIAL_TOKENS and value is not None:
            raise ValueError(f"{file}: {name} is {show(value)}, not a token's text")
    return tokens


def are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def conversation(messages, tools, add_generation_prompt: bool, arguments: dict) -> dict:
    """A template's variables: JSON's kinds of data, none of it the caller's own."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {show(messages)}, not a list with a message in it")
    if tools is not None and not are_objects(tools):
        raise ValueError(f"tools is {show(tools)}, not a list of objects")
    return {
        "documents": None,  # defined in transformers
        **copied(arguments, "the template's arguments"),
        "messages": [message_of(message, f"messages[{i}]") for i, message in enumerate(messages)],
        "tools": copied(tools, "tools"),
        "add_generation_prompt": add_generation_prompt,
    }


def message_of(message: object, where: str) -> dict:
    """A message as transformers 5 passes it on: no nulls, and thoughts under their usual name."""
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {show(message)}, not an object")
    message = {k: v for k, v in copied(message, where).items() if v is not None}
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{where}: role is {show(message.get('role'))}, not a text")
    if not are_objects(message.get("tool_calls", [])):
        raise ValueError(f"{where}: tool_calls is {show(message['tool_calls'])}, not objects")
    if "content" in message:
        message["content"] = text_of(message["content"], where)
    for thoughts in [message[name] for name in THOUGHTS if name in message][:1]:
        message = {"thinking": thoughts} | message | {"reasoning_content": thoughts}
    return message


def text_of(content: object, where: str) -> str:
    """A message's text; that of several parts, joined."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts if are_objects(parts) else [{}]:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{where}: content is {show(content)}, not a text or text parts")
    return "".join(part["text"] for part in parts)


def copied(value: object, where: str):
    try:
        return json.loads(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"{where}: cannot be written as JSON ({one_line(e)})") from None


def changed(variables: dict, change: Callable[[str, bool], str]) -> dict:
    """`variables` with change(text, whether a model wrote it) for every text in them."""

    def of(value, by_model=False):
        if isinstance(value, dict):
            return {of(key): of(item) for key, item in value.items()}
        if isinstance(value, list):
            return [of(item) for item in value]
        return change(value, by_model) if isinstance(value, str) else value

    def of_message(message):
        written = ("content", *THOUGHTS) if message["role"] == "assistant" else ()
        return {of(key): of(item, key in written) for key, item in message.items()}

    given = {name: of(value) for name, value in variables.items()}
    return given | {"messages": [of_message(message) for message in variables["messages"]]}
