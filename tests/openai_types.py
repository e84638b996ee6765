"""What OpenAI's own types say of what the server sends: its client takes nearly anything."""

from __future__ import annotations

import json
from collections.abc import Iterator

from openai import BaseModel
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

WHOLE = {"/v1/chat/completions": ChatCompletion, "/v1/completions": Completion}
CHUNKS = {"/v1/chat/completions": ChatCompletionChunk, "/v1/completions": Completion}
OURS = {"reasoning_content", "meta"}  # fields that other servers have, and OpenAI has not


def faults(data: dict, path: str, *, chunk: bool = False) -> list[str]:
    """What is not exactly as the type of an answer at `path`, or of a chunk of one, has it."""
    if "error" in data:
        needed = {"message", "type", "param", "code"}
        missing = sorted(needed - data["error"].keys())
        return [f"error.{name} is missing" for name in missing] + against(
            ErrorObject, data["error"]
        )
    if path.startswith("/v1/models"):
        return [fault for model in data.get("data", [data]) for fault in against(Model, model)]
    if chunk and CHUNKS[path] is Completion:
        # null while it goes on, as OpenAI sends it; its type knows only the end
        choices = [{"finish_reason": None} | choice for choice in data["choices"]]
        for choice in choices:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        data = data | {"choices": choices}
    return against((CHUNKS if chunk else WHOLE)[path], data)


def against(kind: type[BaseModel], data: dict) -> list[str]:
    try:
        found = kind.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as e:
        return [f"{kind.__name__}: {error['loc']}: {error['msg']}" for error in e.errors()]
    return [f"{kind.__name__} has no field {name}" for name in unknown(found) if name not in OURS]


def unknown(value: object) -> Iterator[str]:
    """Names of fields that the types have not."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        value = [getattr(value, name) for name in type(value).model_fields]
    if isinstance(value, list):
        for item in value:
            yield from unknown(item)


class Sent:
    """What apps send: every answer and every chunk is looked at before it goes out."""

    def __init__(self):
        self.n_objects = 0
        self.faults: list[str] = []

    def checked(self, app: ASGIApp) -> ASGIApp:
        """`app`, looked at."""

        async def looked_at(scope: Scope, receive: Receive, send: Send) -> None:
            path, raw, streams = scope["path"], bytearray(), False

            async def sending(message: Message) -> None:
                nonlocal streams
                if message["type"] == "http.response.start":
                    kind = dict(message["headers"]).get(b"content-type", b"")
                    streams = kind.startswith(b"text/event-stream")
                else:
                    raw.extend(message.get("body", b""))
                    if streams or not message.get("more_body"):
                        self._look(raw.decode(), path, streams)
                        raw.clear()
                await send(message)

            await app(scope, receive, sending if path.startswith("/v1/") else send)

        return looked_at

    def _look(self, text: str, path: str, streams: bool) -> None:
        """At a whole answer, or at whole events."""
        texts = [text]
        if streams:
            texts = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        for one in texts:
            if one != "[DONE]":
                self.n_objects += 1
                self.faults += faults(json.loads(one), path, chunk=streams)
