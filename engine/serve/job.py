"""Job: the samples that one HTTP request asks for, between the service's thread and asyncio's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.types import Receive

from engine.serve.errors import busy, failed, stopping, timed_out, wrong
from engine.serve.protocol import Call
from engine.serve.replies import usage_of
from engine.serve.scheduler import Event
from engine.serve.service import Draining, QueueFull, Service, Ticket

LOG = logging.getLogger(__name__)


class Disconnected(Exception):
    """The client has gone: nobody waits for an answer."""


class Job:
    """Samples under way. Its maker calls `cancel` when done with it, whatever happened."""

    def __init__(self, call: Call, timeout: float):
        """Made by `begun`."""
        self._call, self._timeout = call, timeout
        self._events: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._n_tokens = 0
        self.requests: list[Ticket] = []

    @classmethod
    async def begun(cls, service: Service, call: Call, timeout: float) -> Job:
        """Submit all samples of a call, or none: ApiError says why. timeout: in seconds.

        In a thread: what a grammar asks for can take its time, and others stream meanwhile.
        """
        job = cls(call, timeout)
        submitting = asyncio.ensure_future(asyncio.to_thread(job._submit, service))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(lambda _: job.cancel())
            raise
        return job

    def _submit(self, service: Service) -> None:
        deadline = time.monotonic() + self._timeout
        try:
            for prompt in self._call.prompts:
                for sample in range(self._call.params.n):
                    request = service.submit(
                        prompt,
                        self._call.params,
                        self._listener(len(self.requests)),
                        splitter=self._call.splitter(),
                        deadline=deadline,
                        sample=sample,
                    )
                    self.requests.append(request)
        except BaseException as e:
            self.cancel()
            if isinstance(e, QueueFull):
                raise busy(str(e)) from None
            if isinstance(e, Draining):
                raise stopping() from None
            if isinstance(e, ValueError):
                raise wrong(str(e)) from None
            raise

    def _listener(self, index: int):
        def listen(event: Event) -> None:  # in the engine's thread
            with suppress(RuntimeError):  # the loop is closed: the server has stopped
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return listen

    def cancel(self) -> None:
        """Stop what has not ended."""
        for request in self.requests:
            request.cancel()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(sample, event) as they come, until all have ended; ApiError if one fails."""
        left = len(self.requests)
        while left:
            item = await self._events.get()
            if item is None:
                raise Disconnected
            self._n_tokens += len(item[1].token_ids)
            match item[1].finish_reason:
                case "deadline":
                    raise timed_out(self._timeout)
                case "cancelled":  # not by us: we would not be listening
                    raise stopping()
                case "error":
                    LOG.error("a request failed", exc_info=item[1].error)
                    raise failed(item[1].error)
                case "stop" | "length":
                    left -= 1
            yield item

    @asynccontextmanager
    async def watched(self, receive: Receive) -> AsyncIterator[None]:
        """Inside, a client that goes away ends `events`; behind it nothing of the job runs on."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            watcher.cancel()
            self.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel()  # at once: `events` may be waiting behind a slow send
        self._events.put_nowait(None)

    def usage(self) -> dict:
        return usage_of(self._call, self.requests, self._n_tokens)
