"""A file of requests, answered together: python -m engine.batch IN.jsonl OUT.jsonl

OpenAI's batch format in and out. As there, a file is looked at as a whole first, and refused if a
line is no JSON object, or its custom_id is missing or another line's; whatever else is wrong in a
row is its own answer, of status 400. Answers are appended as they come, and rows whose custom_id is
in OUT already are not run again: so a run that was ended, however, goes on where it was.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":  # while we import the rest, Ctrl-C just ends the process: no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit statuses

try:
    import argparse
    import logging
    import os
    from collections.abc import Iterator
    from pathlib import Path
    from queue import SimpleQueue

    import numpy as np
    from tqdm import tqdm

    from engine.batch_files import Results, checked_ids, rows_left
    from engine.checks import check_size
    from engine.config import show
    from engine.files import check_output
    from engine.llm import LLM
    from engine.options import Parser, add_model_options, open_model
    from engine.serve.body import field, needed
    from engine.serve.errors import ApiError, failed, wrong
    from engine.serve.protocol import Call, chat_call, completion_call
    from engine.serve.replies import Reply, usage_of
    from engine.serve.scheduler import Event
    from engine.serve.service import Service, Ticket
    from engine.serve.tokens import Tokens
except ValueError as e:  # an environment variable that says what this processor cannot do
    print(f"error: {e}", file=sys.stderr)
    sys.exit(BAD_INPUT)

CHAT = "/v1/chat/completions"
CALLS = {CHAT: chat_call, "/v1/completions": completion_call}
AHEAD = 24  # samples begun beside those that run, so that a place is never empty
MOST_SAMPLES = 128  # of one row


def parser() -> Parser:
    ap = Parser(
        prog="python -m engine.batch",
        description="Answer the requests of IN, in OpenAI's batch format, and append the answers "
        "to OUT as they come. Rows that OUT has already are skipped: run again to go on.",
        allow_abbrev=False,
    )
    ap.add_argument("input", type=Path, metavar="IN.jsonl", help="a request in each line")
    ap.add_argument("output", type=Path, metavar="OUT.jsonl", help="where the answers go")
    running = "requests that run at once (default: %(default)s)"
    ap.add_argument("--max-running", type=int, metavar="N", default=16, help=running)
    add_model_options(ap, blocks_only=True)
    return ap


def main(argv: list[str] | None = None) -> int:
    sys.stderr = sys.stderr or open(os.devnull, "w")  # closed by whoever started us
    args = parser().parse_args(argv)
    try:
        return run(args)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, MemoryError) as e:
        print(f"error: {str(e) or 'out of memory'}", file=sys.stderr)
        return FAILED


def run(args: argparse.Namespace) -> int:
    check_size("--max-running", args.max_running, 1 << 16)
    check_output(args.output)
    if args.output.exists() and args.input.exists() and args.output.samefile(args.input):
        raise ValueError(f"{args.output}: is the input; answers need a file of their own")
    ids = checked_ids(args.input)
    with Results(args.output, ids) as results:
        before = results.n_done
        try:
            if results.n_done < len(ids):
                answer_rest(args, ids, results)
        except KeyboardInterrupt:
            done = f"{results.n_done} of {len(ids)} rows done"
            print(f"{done}; run again to go on", file=sys.stderr)
            return INTERRUPTED
    n = results.counts
    failures = f", {n['failed']} failed" if n["failed"] else ""
    answers = f"{n['answered']} answered, {n['refused']} refused{failures}"
    earlier = f"; {before} of them in an earlier run" if before else ""
    print(f"{len(ids)} rows: {answers}{earlier}", file=sys.stderr)
    return FAILED if failures else 0


def answer_rest(args: argparse.Namespace, ids: np.ndarray, results: Results) -> None:
    """Answer the rows that have no result yet."""
    llm = open_model(args)
    if llm.tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer.json: a batch needs one")
    name, rows = Path(args.model or "built-in").name, rows_left(args.input, ids, results.is_done)
    with tqdm(total=len(ids), initial=results.n_done, unit="row", disable=None) as bar:
        Batch(llm, name, args.max_running, results, bar).answer(rows)


class Row:
    """A row under way."""

    def __init__(self, custom_id: str):
        self.custom_id = custom_id
        self.call: Call | None = None
        self.reply: Reply | None = None
        self.tickets: list[Ticket] = []  # one a sample
        self.n_left = self.n_tokens = 0  # samples that go on; tokens of all
        self.error: ApiError | None = None
        self.is_cut = False  # ended before its end: it has no result

    def end(self, error: ApiError) -> None:
        """It is answered with an error, once its samples have ended."""
        self.error = self.error or error
        for ticket in self.tickets:
            ticket.cancel()


class Batch:
    """Rows answered together: enough are begun that the engine never waits for one, and no more."""

    def __init__(self, llm: LLM, name: str, max_running: int, results: Results, bar: tqdm):
        """`name`: what answers call the model."""
        self.llm, self.name, self.results, self.bar = llm, name, results, bar
        self.tokens = Tokens(llm.tokenizer)
        self.most = max_running + AHEAD
        self.n_begun = 0  # samples that have not ended
        # from the engine's thread, and from the signal's handler: put() may be called in it
        self.events: SimpleQueue[tuple[Row, int, Event] | None] = SimpleQueue()
        self.service = Service(llm, max_running=max_running, max_queued=self.most + MOST_SAMPLES)

    def answer(self, rows: Iterator[dict]) -> None:
        """Until all are; KeyboardInterrupt on SIGINT, when what is complete is written."""
        before = signal.signal(signal.SIGINT, self._interrupted)
        try:
            for row in rows:
                self._begin(row)
                while self.n_begun >= self.most or not self.events.empty():
                    self._take(self.events.get())
            while self.n_begun:
                self._take(self.events.get())
        except KeyboardInterrupt:
            self.service.close()
            while not self.events.empty():
                self._take(self.events.get())
            raise
        finally:
            self.service.close()
            signal.signal(signal.SIGINT, before)

    def _interrupted(self, number: int, frame) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C does not wait
        self.events.put(None)

    def _begin(self, line: dict) -> None:
        row = Row(line["custom_id"])
        try:
            row.call = self._call_of(line)
            row.reply = Reply(row.call, line["url"] == CHAT, self.name, self.tokens)
            for prompt in row.call.prompts:
                for sample in range(row.call.params.n):
                    self._submit(row, prompt, sample)
        except ApiError as e:
            row.end(e)
        except ValueError as e:
            row.end(wrong(str(e)))
        except Exception as e:  # of this row alone
            self._failed(row, e)
        if not row.n_left:
            self._write(row)

    def _submit(self, row: Row, prompt: list[int], sample: int) -> None:
        index = len(row.tickets)

        def listen(event: Event) -> None:  # in the engine's thread
            self.events.put((row, index, event))

        about = {"splitter": row.call.splitter(), "sample": sample}
        row.tickets.append(self.service.submit(prompt, row.call.params, listen, **about))
        row.n_left += 1
        self.n_begun += 1

    def _call_of(self, line: dict) -> Call:
        """What a row asks for; ApiError names what is wrong in it."""
        method, url = line.get("method"), line.get("url")
        if method != "POST":
            raise wrong(f"method is {show(method)}; POST is needed", "method")
        if not isinstance(url, str) or url not in CALLS:
            raise wrong(f"url is {show(url)}; {' or '.join(CALLS)} is needed", "url")
        body = needed(line, "body", dict)
        field(body, "model", str)  # whatever it is called
        call = CALLS[url](self.llm, body, MOST_SAMPLES)
        if call.stream:
            raise wrong("stream is true; the rows of a batch are answered whole", "stream")
        return call

    def _take(self, item: tuple[Row, int, Event] | None) -> None:
        """An event of a sample; None: SIGINT."""
        if item is None:
            raise KeyboardInterrupt
        row, index, event = item
        row.n_tokens += len(event.token_ids)
        row.reply.choices[index].take(event)
        if event.finish_reason is None:
            return
        if event.finish_reason == "error":
            self._failed(row, event.error)
        row.is_cut |= event.finish_reason == "cancelled"
        row.n_left -= 1
        self.n_begun -= 1
        if not row.n_left:
            self._write(row)

    def _failed(self, row: Row, error: Exception | None) -> None:
        if not isinstance(error, ValueError | MemoryError):  # these say all in their line
            logging.error("row %s failed", show(row.custom_id), exc_info=error)
        row.end(failed(error))

    def _write(self, row: Row) -> None:
        if row.error is not None:
            self.results.append(row.custom_id, row.error.status, row.error.body())
        elif not row.is_cut:
            usage = usage_of(row.call, row.tickets, row.n_tokens)
            self.results.append(row.custom_id, 200, row.reply.whole(usage))
        self.bar.update(self.results.n_done - self.bar.n)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has nothing left to end
    sys.exit(status)
