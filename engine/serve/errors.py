"""ApiError: what a request is refused with, and OpenAI's object for it."""

from __future__ import annotations


class ApiError(Exception):
    """An HTTP status and a message of one line, which the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ):
        """param: the field that is wrong. code, kind: as OpenAI's clients look them up."""
        super().__init__(message)
        self.status, self.param, self.code, self.kind = status, param, code, kind
        self.headers = headers

    def body(self) -> dict:
        about = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": about}


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: something in a request is not as it must be."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str) -> ApiError:
    return ApiError(
        429,
        message,
        code="queue_full",
        kind="rate_limit_error",
        headers={"Retry-After": "1"},
    )


def timed_out(seconds: float) -> ApiError:
    # A client that tries again by itself would only wait as long once more.
    return ApiError(
        504,
        f"the request took longer than {seconds:g} s, the most this server gives one",
        code="timeout",
        kind="timeout_error",
        headers={"x-should-retry": "false"},
    )


def failed(error: Exception | None) -> ApiError:
    """500. ValueError and MemoryError say in one line what is wrong; others stay in the log."""
    told = f": {error}" if isinstance(error, ValueError | MemoryError) and str(error) else ""
    return ApiError(500, f"the engine failed on this request{told}", kind="server_error")


def stopping() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", kind="server_error")
