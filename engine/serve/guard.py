"""Who may ask: the key, and pages of other sites; and how those are answered who may not."""

from __future__ import annotations

import hmac
import os
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.config import show
from engine.serve.errors import ApiError

OPEN = ("/", "/health")  # the page asks for a key itself


class Guard:
    """Refuses requests without the key, and those that a browser sends for a foreign page."""

    def __init__(self, app: ASGIApp, key: str | None, origins: Collection[str]):
        """key: None for no key. origins: of pages that may ask, beside the server's own."""
        self._app, self._origins = app, frozenset(origins)
        self._key = None if key is None else os.fsencode(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (response_of(refusal) if refusal else self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin and not {origin, "*"} & self._origins:
            # A page needs no leave to send a form to a server on loopback, and to keep it busy.
            if place_of(origin) != headers.get("host"):
                message = f"pages of {show(origin)} may not ask; --cors-origin lets them"
                return ApiError(403, message, code="foreign_origin")
        if self._key is None or scope["path"] in OPEN:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Headers are read as Latin-1: back to the bytes that came.
        if hmac.compare_digest(given.strip().encode("latin-1"), self._key):
            if scheme.lower() == "bearer":
                return None
        return ApiError(
            401,
            "the API key is missing or wrong; Authorization: Bearer KEY is needed",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def place_of(origin: str) -> str | None:
    """Where an origin's pages come from, as they name it in Host; None for what is no origin."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # such as a bracket without its other
        return None


def response_of(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)
