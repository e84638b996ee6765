"""Conversation: messages, and the one session in which a model answers them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.chat import one_line
from engine.config import show
from engine.files import write_whole
from engine.llm import LLM
from engine.params import SamplingParams
from engine.reply import Completion
from engine.session import Session
from engine.tokenizer import refuse_surrogates

MAX_FILE = 16 << 20  # bytes of a conversation: many times what any context holds
ROLES, TEXTS = ("system", "user", "assistant"), {"content", "reasoning_content"}
GREEDY_WARNING = (
    "warning: a model that thinks at temperature 0 tends to repeat itself without end; "
    "a temperature above 0 helps, or no thinking"
)

Show = Callable[[str, str], None]  # what a piece is, "reasoning" or "answer", and its text


class Conversation:
    """Messages, the system's first if there is one; each answer is computed from what is new.

    `messages` is replaced, never changed. A turn that fails before its first token leaves the
    conversation as it was.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        session: Session,
        system: str | None = None,
        arguments: Mapping[str, object] | None = None,
    ):
        """`arguments`: the template's, such as enable_thinking. ValueError for a model that has no
        template: it does not chat."""
        if llm.chat_template is None or llm.tokenizer is None:
            what = "chat template" if llm.tokenizer else "tokenizer.json"
            raise ValueError(
                f"the model has no {what}: it does not chat; give a PROMPT to continue, and no "
                "--chat"
            )
        self.llm, self.params, self.session = llm, params, session
        self.arguments = dict(arguments or {})
        self.messages: list[dict] = []
        self.last: Completion | None = None  # the last turn's
        self.totals: Counter[str] = Counter()  # of all turns: turns, tokens, prompt, reused
        if system is not None:
            self.system = system

    @property
    def system(self) -> str | None:
        """The system message."""
        begun = self.messages[:1]
        return begun[0]["content"] if begun and begun[0]["role"] == "system" else None

    @system.setter
    def system(self, text: str) -> None:
        refuse_surrogates(text)
        rest = self.messages if self.system is None else self.messages[1:]
        self.messages = [{"role": "system", "content": text}, *rest]

    def asked(self, text: str | None) -> list[dict]:
        """The messages to answer: these and one more, or for None these without their answer."""
        if text is not None:
            return [*self.messages, {"role": "user", "content": text}]
        answered = self.messages[-1:] and self.messages[-1]["role"] == "assistant"
        asked = self.messages[:-1] if answered else self.messages
        if not asked or asked[-1]["role"] != "user":
            raise ValueError("there is no message to answer again")
        return asked

    def answer(self, asked: list[dict], show: Show) -> Completion:
        """Answer what `asked` gave, and keep both; `show` gets the pieces as they come.

        What ends a turn early, an interrupt or an error, is raised; the answer so far is kept.
        """
        generation = self.llm.stream_chat(asked, self.params, self.session, **self.arguments)
        try:
            for kind, piece in generation.parts():
                show(kind, piece)
        finally:
            done = generation.completion
            if done.token_ids or done.finish_reason:
                self._keep(asked, done)
        return done

    def clear(self) -> None:
        """Forget all but the system message, whose rows stay in the session."""
        self.messages = [] if self.system is None else self.messages[:1]

    def n_tokens(self) -> int:
        """How long the conversation is now, as the template writes it."""
        if not self.messages:
            return 0
        encode, tokenizer = self.llm.chat_template.encode, self.llm.tokenizer
        return len(encode(tokenizer, self.messages, add_generation_prompt=False, **self.arguments))

    def save(self, path: str) -> None:
        """Write the messages to a file, whole or not at all; OSError says why it cannot be."""
        text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        write_whole(os.path.expanduser(path), lambda part: part.write_text(text, encoding="utf-8"))

    def load(self, path: str) -> None:
        """Go on with the messages of a file; ValueError, and nothing changes, if it has no such."""
        messages = read_messages(Path(os.path.expanduser(path)))
        waits = messages[-1:] and messages[-1]["role"] == "user"
        asked = messages if waits else [*messages, {"role": "user", "content": ""}]
        try:
            refuse_surrogates(self.llm.chat_template.render(asked, **self.arguments))
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from None
        self.messages = messages

    def _keep(self, asked: list[dict], done: Completion) -> None:
        thoughts = {"reasoning_content": done.reasoning} if done.reasoning else {}
        self.last, m = done, done.metrics
        self.totals.update(
            turns=1, tokens=len(done.token_ids), prompt=m.prompt_tokens, reused=m.cached_tokens
        )
        # the last, since by these a turn is known to be kept, wherever Ctrl-C comes
        self.messages = [*asked, {"role": "assistant", "content": done.text, **thoughts}]


def thinks_greedily(
    llm: LLM, params: SamplingParams, messages: list[dict], arguments: Mapping[str, object]
) -> bool:
    """Whether the answer may begin with thoughts of the likeliest tokens: GREEDY_WARNING."""
    template = llm.chat_template
    if params.temperature != 0 or template is None:
        return False
    return template.may_think(messages, **arguments)


def read_messages(path: Path) -> list[dict]:
    """The messages in a file; ValueError, in one line, says what is wrong with it."""
    if not os.path.isfile(path):
        raise ValueError(f"{path}: is not a file")
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE + 1)
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror or e}") from None
    if len(raw) > MAX_FILE:
        raise ValueError(f"{path}: is longer than {MAX_FILE:,} bytes, the most of a conversation")
    try:
        messages = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: cannot be read as JSON ({one_line(e)})") from None
    if not isinstance(messages, list):
        raise ValueError(f"{path}: holds a {type(messages).__name__}, not a list of messages")
    for i, message in enumerate(messages):
        check_message(message, ROLES[i > 0 :], f"{path}: messages[{i}]")
    return messages


def check_message(message: object, roles: tuple[str, ...], where: str) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {show(message)}, not an object")
    if message.get("role") not in roles:
        raise ValueError(
            f"{where}: role is {show(message.get('role'))}; {' or '.join(roles)} is needed"
        )
    if "content" not in message:
        raise ValueError(f"{where} has no content")
    for name in message.keys() - {"role"}:
        if name not in TEXTS:
            raise ValueError(f"{where}: {show(name)} is not a part of a message here")
        if not isinstance(message[name], str):
            raise ValueError(f"{where}: {name} is {show(message[name])}, not a text")
