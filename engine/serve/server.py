"""The app: routes, and what goes wrong in them, as OpenAI's clients expect both."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from engine.config import show
from engine.llm import LLM
from engine.serve.body import field, needed, parsed
from engine.serve.errors import ApiError, failed, wrong
from engine.serve.guard import Guard, response_of
from engine.serve.job import Disconnected, Job
from engine.serve.metrics import ServerMetrics
from engine.serve.protocol import Call, chat_call, completion_call
from engine.serve.replies import Reply
from engine.serve.service import Service
from engine.serve.tokens import Tokens

PAGE = Path(__file__).parent / "page.html"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
GONE = 499  # nginx's status for a client that has gone; it reaches nobody


@dataclass(frozen=True)
class Limits:
    """What one request may cost."""

    body_bytes: int = 4 << 20
    seconds: float = 600.0  # from the request to its last token
    samples: int = 64  # that one request may ask for


def create_app(
    llm: LLM,
    service: Service,
    *,
    name: str,
    api_key: str | None = None,
    cors_origins: Collection[str] = (),
    limits: Limits | None = None,
) -> FastAPI:
    """The server of a model. The service stays its maker's, who closes it.

    name: what the model is called; requests may call it anything, as with llama-server. api_key:
    what clients must show, None for no key. cors_origins: origins of pages on other sites that may
    ask, "*" for all. ValueError for a model without a tokenizer.
    """
    if llm.tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer.json: the server needs one")
    app = FastAPI(title="engine", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    app.add_middleware(Guard, key=api_key, origins=cors_origins)
    if cors_origins:
        allowed = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), **allowed)
    add_error_handlers(app)
    Routes(llm, service, name, limits or Limits()).add_to(app)
    return app


class Routes:
    def __init__(self, llm: LLM, service: Service, name: str, limits: Limits):
        self.llm, self.service, self.name, self.limits = llm, service, name, limits
        self.tokens = Tokens(llm.tokenizer)
        self.metrics = ServerMetrics(service)
        self.started = int(time.time())
        self.html = PAGE.read_text(encoding="utf-8")

    def add_to(self, app: FastAPI) -> None:
        for path, route in (
            ("/", self.page),
            ("/health", self.health),
            ("/metrics", self.prometheus),
            ("/v1/models", self.models),
            ("/v1/models/{name:path}", self.model),
        ):
            app.api_route(path, methods=["GET", "HEAD"])(route)
        for path, route in (
            ("/v1/chat/completions", self.chat),
            ("/v1/completions", self.completions),
            ("/tokenize", self.tokenize),
            ("/detokenize", self.detokenize),
        ):
            app.post(path)(route)

    async def page(self) -> Response:
        return HTMLResponse(self.html, headers=PAGE_HEADERS)

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def prometheus(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self.about()]})

    async def model(self, name: str) -> Response:
        if name != self.name:
            message = f"there is no model {show(name)}; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(self.about())

    def about(self) -> dict:
        config = self.llm.config
        return {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "engine",
            "meta": {
                "n_vocab": config.vocab_size,
                "n_ctx_train": config.max_context,
                "n_ctx": self.llm.context,
                "chat": self.llm.chat_template is not None,
            },
        }

    async def chat(self, request: Request) -> Response:
        return await self.answer(request, chat_call)

    async def completions(self, request: Request) -> Response:
        return await self.answer(request, completion_call)

    async def tokenize(self, request: Request) -> Response:
        """llama-server's; the text of special tokens is them, unless parse_special is false."""
        return await run_in_threadpool(self.tokenized, await self.read(request))

    async def detokenize(self, request: Request) -> Response:
        return await run_in_threadpool(self.detokenized, await self.read(request))

    def tokenized(self, raw: bytes) -> Response:
        body = parsed(raw)
        content = needed(body, "content", str)
        plain = not field(body, "parse_special", bool, True)
        tokenizer = self.llm.tokenizer
        encode = tokenizer.encode_plain if plain else tokenizer.encode
        try:
            ids = encode(content)
        except ValueError as e:
            raise wrong(str(e), "content") from None
        if field(body, "with_pieces", bool, False):
            ids = [{"id": i, "piece": self.tokens.piece(i)} for i in ids]
        return JSONResponse({"tokens": ids})

    def detokenized(self, raw: bytes) -> Response:
        ids = needed(parsed(raw), "tokens", list)
        for i in ids:
            if type(i) is not int or not 0 <= i < self.llm.config.vocab_size:
                most = self.llm.config.vocab_size - 1
                raise wrong(f"tokens has {show(i)}; ids from 0 to {most} are needed", "tokens")
        text = b"".join(map(self.tokens.bytes_of, ids)).decode("utf-8", "replace")
        return JSONResponse({"content": text})

    async def answer(self, request: Request, call_of: Callable[[LLM, dict, int], Call]) -> Response:
        """Read, submit, and answer whole or in a stream."""
        raw = await self.read(request)
        most = self.limits.samples
        call = await run_in_threadpool(lambda: call_of(self.llm, named(parsed(raw)), most))
        job = await Job.begun(self.service, call, self.limits.seconds)
        reply = Reply(call, call_of is chat_call, self.name, self.tokens)
        if call.stream:
            return EventStream(job, self.chunks(job, call, reply))
        async with job.watched(request.receive):
            async for index, event in job.events():
                reply.choices[index].take(event)
            self.count(job)
            return JSONResponse(reply.whole(job.usage()))

    async def chunks(self, job: Job, call: Call, reply: Reply) -> AsyncIterator[dict]:
        for choice in reply.choices:
            for chunk in reply.chunks(choice.first()):
                yield chunk
        async for index, event in job.events():
            for chunk in reply.chunks(reply.choices[index].take(event)):
                yield chunk
        self.count(job)
        if call.include_usage:
            yield reply.last_chunk(job.usage())

    def count(self, job: Job) -> None:
        for request in job.requests:
            done = request.completion
            self.metrics.ended(done.metrics, len(done.token_ids))

    async def read(self, request: Request) -> bytes:
        """A request's body; 413 where it is too large, 408 where it does not come."""
        most, raw = self.limits.body_bytes, bytearray()
        told = request.headers.get("content-length", "")
        message = f"the body is larger than {most} bytes, the most it may have"
        too_large = ApiError(413, message, code="request_too_large")
        if told.isdecimal() and int(told[:20]) > most:
            raise too_large
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for chunk in request.stream():
                    raw += chunk
                    if len(raw) > most:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, "the body did not come in time", code="timeout") from None
        return bytes(raw)


class EventStream(StreamingResponse):
    """A job's chunks as server-sent events. A client that goes away ends the job at once."""

    def __init__(self, job: Job, chunks: AsyncIterator[dict]):
        super().__init__(chunks, media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"  # nginx would keep them together
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def body(data: str, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": data.encode(), "more_body": more}
            await send(message)
            await asyncio.sleep(0)  # send may not wait: let others run, and see who has gone

        async with self._job.watched(receive):
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                async for chunk in self.body_iterator:
                    await body(sent(chunk))
                await body("data: [DONE]\n\n", False)
            except Disconnected:
                pass
            except ApiError as e:  # too late for a status
                await body(sent(e.body()), False)


def sent(data: dict) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def named(body: dict) -> dict:
    """`body`, if the model that it names has a name."""
    field(body, "model", str)
    return body


def add_error_handlers(app: FastAPI) -> None:
    """OpenAI's error object for everything that goes wrong."""

    async def refused(request: Request, error: ApiError) -> Response:
        return response_of(error)

    async def unknown(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {show(request.scope['path'])}"
        code = "unknown_url" if error.status_code == 404 else None
        message = f"{where}: {str(error.detail).lower()}"
        told = ApiError(error.status_code, message, code=code, headers=error.headers)
        return response_of(told)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=GONE)

    async def broken(request: Request, error: Exception) -> Response:
        return response_of(failed(None))  # uvicorn writes the traceback to its log

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(Disconnected, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, broken)
