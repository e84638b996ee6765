"""The command line: python -m engine.run "To be, or not to be" """

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":  # while we import the rest, Ctrl-C just ends the process: no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit statuses

try:
    import argparse
    import json
    import os
    from contextlib import nullcontext, suppress
    from dataclasses import fields, replace
    from pathlib import Path

    from engine.conversation import GREEDY_WARNING, Conversation, thinks_greedily
    from engine.files import check_output
    from engine.generate import Generation
    from engine.llm import LLM
    from engine.machine import bounds
    from engine.options import Parser, add_model_options, open_model
    from engine.repl import DIM, Lines, Repl
    from engine.reply import Completion
    from engine.sampler import SamplingParams
    from engine.session import Session
    from engine.trace import write_steps, write_trace
except ValueError as e:  # an environment variable that says what this processor cannot do
    print(f"error: {e}", file=sys.stderr)
    sys.exit(BAD_INPUT)

MAX_TEXT = 16 << 20  # bytes of a file: many times what any context holds; a device never ends


def parser() -> Parser:
    default = SamplingParams()
    ap = Parser(
        prog="python -m engine.run",
        description="Continue a text with a Qwen3 model. The text streams to stdout; "
        "a report of the run goes to stderr.",
        allow_abbrev=False,
    )

    def option(name: str, kind: type, letter: str, value, text: str) -> None:
        ap.add_argument(name, type=kind, metavar=letter, default=value, help=text)

    ap.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    option("--prompt-file", str, "F", None, "read the prompt from F, as it is; - is stdin")
    ap.add_argument(
        "--chat", action="store_true", help="PROMPT is a message: answer it; without it, converse"
    )
    option("--system", str, "TEXT", None, "with --chat, a system message before it")
    ap.add_argument("--no-thinking", action="store_true", help="with --chat, answer at once")
    option("--thinking-budget", int, "N", None, "with --chat, thoughts end after N tokens")
    ap.add_argument("--hide-thinking", action="store_true", help="with --chat, show no thoughts")
    limit = f"at most N tokens (default: {default.max_tokens}; in a conversation, none)"
    option("--max-tokens", int, "N", None, limit)
    own = "default: the model's own, else"
    for name, kind, letter, text in (
        ("--temperature", float, "T", f"above 1 bolder, below 1 safer, 0 the likeliest ({own} 1)"),
        ("--top-k", int, "K", f"only the K likeliest tokens ({own} 0, all)"),
        ("--top-p", float, "P", f"only the fewest likeliest that hold the share P ({own} 1, all)"),
        (
            "--min-p",
            float,
            "P",
            f"only those at least P times as likely as the first ({own} 0, all)",
        ),
    ):
        option(name, kind, letter, None, text)
    for name, letter, text in (
        ("--repetition-penalty", "X", f"makes tokens of prompt and text rarer ({own} 1: not)"),
        ("--presence-penalty", "X", "takes X off the logits of tokens in the text (default: 0)"),
        ("--frequency-penalty", "X", "takes it off for each time they are there (default: 0)"),
    ):
        option(name, float, letter, None, text)
    ap.add_argument("--stop", action="append", metavar="S", help="end before S; may be repeated")
    option("--min-tokens", int, "N", None, "no end of the text before N tokens (default: 0)")
    option("--logprobs", int, "N", None, "with --json, logprobs of N tokens beside each chosen one")
    option(
        "--json-schema", str, "F", None, "the text is JSON of the schema in F, or given as {...}"
    )
    option("--regex", str, "R", None, "the whole text matches R")
    option("--seed", int, "S", None, "the same seed gives the same text (default: a fresh one)")
    ap.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    option("--save-cache", Path, "F", None, "write the tokens and their K and V to F afterwards")
    option("--load-cache", Path, "F", None, "continue from F, or reuse what PROMPT shares with it")
    ap.add_argument("--profile", action="store_true", help="show what the time went into")
    option("--trace", Path, "F", None, "write a Chrome trace of the run to F")
    option("--steps", Path, "F", None, "write a CSV table to F, a row a step")
    ap.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_model_options(ap)
    return ap


def main(argv: list[str] | None = None) -> int:
    for name in ("stdout", "stderr"):  # closed by whoever started us
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))
    args = parser().parse_args(argv)
    try:
        return run(args)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, MemoryError) as e:
        print(f"error: {str(e) or 'out of memory'}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush
        return FAILED


def run(args: argparse.Namespace) -> int:
    if args.json_schema is not None:
        args.json_schema = schema_of(args.json_schema)
    converse = args.chat and args.prompt is None and args.prompt_file is None
    names = [f.name for f in fields(SamplingParams)]
    given = {n: vars(args)[n] for n in names if vars(args).get(n) is not None}
    given = {"max_tokens": None} | given if converse else given
    SamplingParams(**given)  # said before any work
    if converse:
        check_conversation(args)
    prompt = None if converse else prompt_of(args)
    for name in ("system", "no_thinking", "thinking_budget", "hide_thinking"):
        if is_given(args, name) and not args.chat:
            raise ValueError(f"--{name.replace('_', '-')} is for --chat")
    if is_given(args, "logprobs") and not args.json:
        raise ValueError("--logprobs is for --json: a text has no place for them")
    thinking = {"enable_thinking": False} if args.no_thinking else {}
    check_outputs(args)
    llm = open_model(args)
    session = llm.load_cache(args.load_cache) if args.load_cache else llm.new_session()
    wanted = args.profile or args.trace is not None or args.steps is not None
    params = replace(llm.default_params, **given)
    if converse:
        return run_conversation(args, llm, params, session, thinking)
    if args.chat:
        messages = messages_of(args, prompt)
        if thinks_greedily(llm, params, messages, thinking):
            print(GREEDY_WARNING, file=sys.stderr)
        generation = llm.stream_chat(messages, params, session, wanted, **thinking)
    else:
        generation = llm.stream(prompt, params, session, wanted)
    status, thoughts_shown = 0, sys.stderr.isatty() and not args.hide_thinking
    try:
        for kind, piece in generation.parts():
            if kind == "reasoning" and thoughts_shown:
                print(DIM.format(piece), end="", file=sys.stderr, flush=True)
            elif kind == "answer" and not args.json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:  # whatever becomes of the output
        if args.save_cache:
            llm.save_cache(session, args.save_cache)
    report(args, llm, generation)
    if args.json_schema is not None or args.regex is not None:
        warn_if_cut(generation.completion)
    return status


def is_given(args: argparse.Namespace, name: str) -> bool:
    return vars(args)[name] is not None and vars(args)[name] is not False


def check_conversation(args: argparse.Namespace) -> None:
    """ValueError, before any work, for what only a run with one answer has."""
    for name in ("json", "logprobs", "profile", "trace", "steps"):
        if is_given(args, name):
            raise ValueError(f"--{name} is for one answer: give --chat a PROMPT")
    if sys.stdin is None:
        raise ValueError("--chat without a PROMPT reads stdin, which is closed")


def run_conversation(
    args: argparse.Namespace, llm: LLM, params: SamplingParams, session: Session, thinking: dict
) -> int:
    """Answer messages from stdin until it ends; an error ends one turn, and shows in a script's
    status."""
    conversation = Conversation(llm, params, session, args.system, thinking)
    person = sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())
    if person:
        # its library takes a tenth of a second to import, for which no other run should wait
        from engine.terminal import Terminal

        repl = Repl(conversation, Terminal().read, person, args.hide_thinking)
        repl.greet()
    else:
        repl = Repl(conversation, Lines(sys.stdin.buffer).read, person, args.hide_thinking)
    try:
        return 0 if repl.run() or person else BAD_INPUT
    finally:  # whatever ended it
        if args.save_cache and session.ids:
            llm.save_cache(session, args.save_cache)


def check_outputs(args: argparse.Namespace) -> None:
    """ValueError, before any work, for files that cannot be written or would replace each other."""
    outputs = [p for p in (args.save_cache, args.trace, args.steps) if p is not None]
    for path in outputs:
        check_output(path)
    written = [path.resolve() for path in outputs]
    # a session may go on in one file
    loaded = None if args.load_cache == args.save_cache else args.load_cache
    read = [Path(p).resolve() for p in (args.prompt_file, loaded) if p is not None]
    if len(set(written)) < len(written) or set(written) & set(read):
        raise ValueError("--save-cache, --trace and --steps need files of their own")


def report(args: argparse.Namespace, llm: LLM, generation: Generation) -> None:
    """What a run has to say when its text is out, and the files that were asked for."""
    done = generation.completion
    if args.profile:
        kind = "int8" if llm.settings["int8"] else "f32"
        with suppress(MemoryError, KeyboardInterrupt):  # then the table has no bounds
            done.profile.bounds = bounds(llm.settings["threads"], kind)
    if args.json:
        result = {
            "text": done.text,
            **({"reasoning": done.reasoning} if args.chat else {}),
            "token_ids": done.token_ids,
            **({"logprobs": done.logprobs} if args.logprobs is not None else {}),
            "finish_reason": done.finish_reason,
            "metrics": done.metrics.as_dict(),
            "settings": llm.settings | vars(generation.params),
        }
        if args.profile:
            result["profile"] = done.profile.as_dict()
        print(json.dumps(result), flush=True)
    else:
        print(flush=True)
        print(done.metrics.report(args.backend, args.kv_cache), file=sys.stderr)
        m = done.metrics
        if args.lookup:
            print(
                f"came of {m.guessed_tokens} guessed tokens: {m.accepted_tokens}", file=sys.stderr
            )
        if args.load_cache:
            print(f"reused {m.cached_tokens} of {m.prompt_tokens} tokens", file=sys.stderr)
        if args.profile:
            print(f"\n{done.profile.table()}", file=sys.stderr)
    if args.trace:
        write_trace(done.profile, args.trace)
    if args.steps:
        write_steps(done.profile, args.steps)


def warn_if_cut(done: Completion) -> None:
    """One line on stderr where an output that had to be whole ended at a limit."""
    if done.finish_reason == "length":
        cut = f"the output was cut at {len(done.token_ids)} tokens and is not complete"
        print(f"warning: {cut}", file=sys.stderr)


def messages_of(args: argparse.Namespace, prompt: str) -> list[dict]:
    """The conversation that `prompt` and --system are."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": prompt}]


def prompt_of(args: argparse.Namespace) -> str | None:
    """The prompt from the command line, a file or stdin; ValueError if there is not exactly one.

    None where a loaded cache is to be continued as it is.
    """
    if args.load_cache and args.prompt is None and args.prompt_file is None:
        return None
    if (args.prompt is None) == (args.prompt_file is None):
        raise ValueError("give a PROMPT or --prompt-file, one of the two")
    return args.prompt if args.prompt is not None else text_of(args.prompt_file)


def schema_of(given: str) -> str:
    """A JSON schema from the command line: itself, or the file that it is in."""
    return given if given.lstrip().startswith("{") else text_of(given)


def text_of(file: str) -> str:
    """What is in a file, or comes from stdin; ValueError if it cannot be read."""
    if not file:
        raise ValueError("the name of a file to read is empty")
    if file == "-" and sys.stdin is None:
        raise ValueError("-: stdin is closed")
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as stream:
            raw = stream.read(MAX_TEXT + 1)
        if len(raw) > MAX_TEXT:
            raise ValueError(f"{file}: is longer than {MAX_TEXT:,} bytes, the most of a text")
        return raw.decode("utf-8")
    except OSError as e:
        raise ValueError(f"{file}: {e.strerror or e}") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"{file}: is not UTF-8 text (byte {e.start})") from None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has nothing left to end
    sys.exit(status)
