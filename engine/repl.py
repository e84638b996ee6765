"""A conversation with whoever is at stdin: messages, answers, commands."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO

from engine.conversation import GREEDY_WARNING, Conversation, thinks_greedily
from engine.reply import Completion

DIM = "\x1b[2m{}\x1b[0m"
SETTABLE = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "thinking_budget"),
)
COMMANDS = {
    "system": ("[TEXT]", "show the system message, or set it"),
    "clear": ("", "forget all but the system message, which frees the context"),
    "retry": ("", "answer the last message again"),
    "save": ("F", "write the conversation to F, as JSON"),
    "load": ("F", "go on with the conversation in F"),
    "think": ("[on|off]", "whether the model thinks before it answers"),
    "set": ("[NAME VALUE]", "show how tokens are chosen, or change it: /set temperature 0.6"),
    "stats": ("", "what the last turn and all of them took, and the context in use"),
    "help": ("", "this list"),
    "quit": ("", "leave, as Ctrl-D does"),
}
HELP = """\
Enter sends a message; Alt-Enter, or a backslash at the end of a line, begins another line.
Ctrl-C stops an answer, or clears what was typed; Ctrl-D leaves.
A message that begins with a slash is sent with another one before it: //etc/hosts"""


class Repl:
    """Reads messages, shows answers. Answers go to stdout, all else to stderr."""

    def __init__(
        self,
        conversation: Conversation,
        read: Callable[[str], str],
        interactive: bool,
        hide_thinking: bool = False,
    ):
        """`read`: is given a text to begin with, and gives a message; EOFError where they end.
        `interactive`: a person sits there, who can go on after Ctrl-C."""
        self.conversation, self._read, self._interactive = conversation, read, interactive
        self._dim = DIM if sys.stderr.isatty() else "{}"
        self._thoughts_shown = sys.stderr.isatty() and not hide_thinking
        self._thinking = False  # thoughts are the last that was shown
        self._warned = self._interrupted = False
        self._last = ""  # the last turn's summary
        self._draft = ""  # a message that was not answered, for the person to send again

    def greet(self) -> None:
        s = self.conversation.llm.settings
        self._note(f"{s['model']}: {s['weights']}, a context of {s['context']} tokens")
        self._note("/help lists the commands, Ctrl-D leaves")

    def run(self) -> bool:
        """Until the input ends; False if something in it was refused or failed."""
        if not self._interactive:
            return self._run()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # but for `_interruptible`
        try:
            return self._run()
        finally:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)

    def _run(self) -> bool:
        good = True
        while True:
            try:
                self._step()
            except EOFError:
                return good
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._tell("")
            except (ValueError, MemoryError) as e:
                good = False
                self._tell(f"error: {' '.join(str(e).split()) or 'out of memory'}")

    def _step(self) -> None:
        """One message or command."""
        draft, self._draft = self._draft, ""
        text = self._read(draft)
        with self._interruptible():
            if text.startswith("/") and not text.startswith("//"):
                self._command(text)
            elif text.strip():
                self._turn(text)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C raises KeyboardInterrupt in the block, but once: what it ends can end in peace."""
        self._interrupted = False
        if not self._interactive:
            yield
            return

        def interrupt(number, frame):
            if not self._interrupted:
                self._interrupted = True
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _turn(self, text: str | None) -> None:
        """Answer what was typed, or for None the last message again."""
        c, self._thinking = self.conversation, False
        before = c.messages
        try:
            asked = c.asked(None if text is None else text[text.startswith("//") :])
            if not self._warned and thinks_greedily(c.llm, c.params, asked, c.arguments):
                self._warned = True
                self._tell(GREEDY_WARNING)
            c.answer(asked, self._show)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            if c.messages is before:
                self._note("\n[stopped before an answer]")
        finally:
            if c.messages is before:
                self._draft = text or ""
            else:
                self._last = summary(c.last, c.params.max_tokens)
                print(flush=True)
                self._note(f"[{self._last}]")

    def _show(self, kind: str, piece: str) -> None:
        if self._interrupted:  # the first was lost, in a destructor or a callback
            raise KeyboardInterrupt
        if kind == "answer":
            if self._thinking:
                self._tell("\n")
            self._thinking = False
            print(piece, end="", flush=True)
        elif self._thoughts_shown:
            self._thinking = True
            print(self._dim.format(piece), end="", file=sys.stderr, flush=True)

    def _tell(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _note(self, text: str) -> None:
        self._tell(self._dim.format(text))

    # ------------------------------------------------------------ commands

    def _command(self, text: str) -> None:
        name, rest = split(text[1:])
        if name not in COMMANDS:
            raise ValueError(
                f"there is no command /{name}; /help lists them, and //{name} sends it as a message"
            )
        usage, _ = COMMANDS[name]
        if bool(rest) > bool(usage) or (not rest and usage and not usage.startswith("[")):
            raise ValueError(f"/{name} takes {usage or 'nothing'}")
        getattr(self, f"_{name}")(rest)

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = text
            self._note("the system message is set")
        else:
            system = self.conversation.system
            self._note("there is no system message" if system is None else system)

    def _clear(self, _: str) -> None:
        self.conversation.clear()
        self._note("the conversation is forgotten")

    def _retry(self, _: str) -> None:
        self._turn(None)

    def _save(self, path: str) -> None:
        try:
            self.conversation.save(path)
        except OSError as e:
            raise ValueError(str(e)) from None
        self._note(f"saved {counted(len(self.conversation.messages), 'message')}")

    def _load(self, path: str) -> None:
        self.conversation.load(path)
        self._note(f"loaded {counted(len(self.conversation.messages), 'message')}")

    def _think(self, wanted: str) -> None:
        known = {"on": True, "off": False}
        if wanted and wanted not in known:
            raise ValueError(f"/think takes on or off, not {wanted}")
        arguments = self.conversation.arguments
        if wanted:
            arguments["enable_thinking"] = known[wanted]
        names = {on: name for name, on in known.items()}
        self._note(f"thinking: {names.get(arguments.get('enable_thinking'), 'as the model does')}")

    def _set(self, text: str) -> None:
        c = self.conversation
        name, value = split(text)
        if name and name not in SETTABLE:
            raise ValueError(f"{name} cannot be set; {', '.join(SETTABLE)} can")
        if name and not value:
            raise ValueError(f"/set {name} needs a value")
        if name:
            c.params = replace(c.params, **{name: parsed(name, value)})
        for n in [name] if name else SETTABLE:
            self._note(f"{n} {json.dumps(vars(c.params)[n])}")

    def _stats(self, _: str) -> None:
        c, t = self.conversation, self.conversation.totals
        if self._last:
            first = c.last.metrics.time_to_first_token_ms
            after = "" if first is None else f"; first token after {first:.0f} ms"
            self._note(f"last turn: {self._last}{after}")
        self._note(
            f"in all: {counted(t['turns'], 'turn')}, {counted(t['tokens'], 'token')}; "
            f"reused {t['reused']} of {t['prompt']} prompt tokens"
        )
        self._note(f"context: {c.n_tokens()} of {c.llm.context} tokens")

    def _help(self, _: str) -> None:
        lines = [(f"/{name} {usage}", about) for name, (usage, about) in COMMANDS.items()]
        self._note("\n".join([*(f"{left:<18}{about}" for left, about in lines), HELP]))

    def _quit(self, _: str) -> None:
        raise EOFError


def split(text: str) -> tuple[str, str]:
    """The first word, and the rest."""
    first, *rest = text.split(None, 1) or [""]
    return first, "".join(rest).strip()


def summary(done: Completion, max_tokens: int | None) -> str:
    """What a turn took, in a line."""
    m, n = done.metrics, len(done.token_ids)
    rate = m.decode_tokens_per_second
    speed = "" if rate is None else f", {rate:.1f} tok/s"
    full = "; max_tokens reached" if n == max_tokens else "; no room for more"
    end = {"stop": "", None: "; stopped", "length": full}[done.finish_reason]
    reused = f"reused {m.cached_tokens} of {counted(m.prompt_tokens, 'prompt token')}"
    return f"{counted(n, 'token')}{speed}; {reused}{end}"


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def parsed(name: str, value: str) -> object:
    """A value as JSON has it, else as text; SamplingParams say whether it is one."""
    if value == "none":
        return () if name == "stop" else None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if name == "stop" and not isinstance(found, list | str) else found


class Lines:
    """A message a line; a backslash at its end joins the next one."""

    def __init__(self, stream: BinaryIO):
        self._stream, self._number = stream, 0

    def read(self, _draft: str) -> str:
        lines = []
        while line := self._stream.readline():
            self._number += 1
            try:
                text = line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as e:
                raise ValueError(
                    f"line {self._number} is not UTF-8 text (byte {e.start})"
                ) from None
            lines.append(text.removesuffix("\\"))
            if not text.endswith("\\"):
                break
        if not lines:
            raise EOFError
        return "\n".join(lines)
