"""The server's command line: python -m engine.serve --model M"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":  # while we import the rest, Ctrl-C just ends the process: no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit statuses

try:
    import argparse
    import asyncio
    import ipaddress
    import os
    import socket
    from pathlib import Path

    import uvicorn

    from engine.checks import check_size
    from engine.options import Parser, add_model_options, open_model
    from engine.params import check
    from engine.serve.guard import place_of
    from engine.serve.server import Limits, create_app
    from engine.serve.service import Service
except ValueError as e:  # an environment variable that says what this processor cannot do
    print(f"error: {e}", file=sys.stderr)
    sys.exit(BAD_INPUT)
except ModuleNotFoundError as e:
    if e.name not in ("uvicorn", "fastapi", "starlette", "prometheus_client"):
        raise
    print(f'error: {e.name} is missing: pip install ".[server]" brings it', file=sys.stderr)
    sys.exit(BAD_INPUT)

DAY = 86_400.0  # seconds
DRAIN = 30.0  # seconds that requests under way have once the server is to end
SLOW = 5.0  # seconds more for clients to read what they were sent


def parser() -> Parser:
    limits = Limits()
    ap = Parser(
        prog="python -m engine.serve",
        description="Serve a Qwen3 model: OpenAI's API at /v1, a page to chat at /.",
        allow_abbrev=False,
    )

    def option(name: str, kind: type, letter: str, value, text: str) -> None:
        shown = "" if value is None else " (default: %(default)s)"
        ap.add_argument(name, type=kind, metavar=letter, default=value, help=text + shown)

    option("--alias", str, "NAME", None, "what clients are told it is called (default: as M ends)")
    option("--host", str, "H", "127.0.0.1", "the address to listen at")
    option("--port", int, "P", 8000, "the port; 0: any that is free")
    option("--api-key", str, "KEY", None, "what clients must show (default: $ENGINE_API_KEY)")
    ap.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        help="pages from URL may ask; * for all; may be repeated (default: none)",
    )
    option("--max-running", int, "N", 16, "requests that run at once")
    option("--max-queued", int, "N", 64, "requests that may wait; more are refused")
    option("--max-body-bytes", int, "N", limits.body_bytes, "the largest request")
    option("--request-timeout", float, "S", limits.seconds, "seconds that a request may take")
    option("--drain-timeout", float, "S", DRAIN, "seconds that requests have to end, on SIGTERM")
    add_model_options(ap, blocks_only=True)
    return ap


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return serve(args)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, MemoryError) as e:
        print(f"error: {str(e) or 'out of memory'}", file=sys.stderr)
        return FAILED


def serve(args: argparse.Namespace) -> int:
    key = checked(args)
    if key is None and not is_loopback(args.host):
        warning = f"warning: whoever reaches {args.host} may use the server: there is no --api-key"
        print(warning, file=sys.stderr)
    with listening(args.host, args.port) as sock:  # said before a model is loaded
        llm = open_model(args)
        service = Service(llm, max_running=args.max_running, max_queued=args.max_queued)
        try:
            app = create_app(
                llm,
                service,
                name=args.alias or Path(args.model or "built-in").name,
                api_key=key,
                cors_origins=args.cors_origin,
                limits=Limits(args.max_body_bytes, args.request_timeout, args.max_queued),
            )
            Server(app, service, sock, args.drain_timeout).run([sock])
        finally:
            service.close()
    return 0


class Server(uvicorn.Server):
    """uvicorn, which on SIGTERM and SIGINT takes no more connections and ends those it has."""

    def __init__(self, app, service: Service, sock: socket.socket, drain_timeout: float):
        """sock: bound, and to be given to `run`. drain_timeout: seconds that requests have."""
        self._service, self._sock, self._drain_timeout = service, sock, drain_timeout
        config = uvicorn.Config(
            app,
            log_level="warning",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=drain_timeout + SLOW,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self._sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving at http://{shown}:{port}", file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(asyncio.to_thread(self._end))
        await super().shutdown(sockets)  # until the connections are closed, or a second signal
        await asyncio.to_thread(self._service.close)
        await ending

    def _end(self) -> None:
        self._service.drain(self._drain_timeout)
        self._service.close()  # what is left is told so


def checked(args: argparse.Namespace) -> str | None:
    """The API key; ValueError, before any work, for an argument that will not do."""
    check("--port", args.port, int, 0, 65_535)
    check_size("--max-running", args.max_running, 1 << 16)
    check_size("--max-queued", args.max_queued, 1 << 16)
    check_size("--max-body-bytes", args.max_body_bytes, 1 << 32)
    check("--request-timeout", args.request_timeout, float, 0, DAY, above=True)
    check("--drain-timeout", args.drain_timeout, float, 0, DAY)
    if args.alias is not None and not args.alias.isprintable():  # half a character is not
        raise ValueError(f"--alias is {args.alias!r}; a text that can be printed is needed")
    for origin in args.cors_origin:
        place = place_of(origin)
        if origin != "*" and (not place or origin != f"{origin.partition(':')[0]}://{place}"):
            raise ValueError(
                f"--cors-origin is {origin!r}; * or one such as https://a.org is needed"
            )
    key = os.environ.get("ENGINE_API_KEY") if args.api_key is None else args.api_key
    if key is not None and (not key.strip() or key != key.strip()):
        raise ValueError("the API key is empty, or has spaces around it")
    return key


def listening(host: str, port: int) -> socket.socket:
    """A socket bound to an address; OSError, in one line, says why not."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sends small writes at once only where it is told that this is TCP: else a chunk
        # waits for the client to acknowledge the one before, 40 ms as a rule
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            if os.name == "posix":  # elsewhere it would let two servers have one port
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as e:
        why = getattr(e, "strerror", None) or e
        raise OSError(f"cannot listen at {host} port {port}: {why}") from None
    return sock


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def end(number: int, frame) -> None:
    """SIGTERM, where uvicorn does not have it: while a model is loaded, and at the very end."""
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, end)
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has nothing left to end
    sys.exit(status)
