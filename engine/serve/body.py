"""A request's bytes -> JSON, and its fields: each of the kind it must be, or refused with 400."""

from __future__ import annotations

import json
from typing import Any

from engine.config import show
from engine.serve.errors import wrong

KINDS = {bool: "true or false", str: "a text", dict: "an object", list: "a list"}


def parsed(raw: bytes, what: str = "the body") -> dict[str, Any]:
    """The object that a body holds; 400 for whatever else it is. `what`: how it is called there."""
    try:
        text = raw.decode("utf-8-sig")  # json's own decoding guesses, and lets half a character by
        body = json.loads(text, parse_constant=refuse_constant)
        if b"\\u" in raw:  # only so can half a character be spelled: UTF-8 has none
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        half = e.object[e.start]
        raise wrong(f"{what} is not valid Unicode: it has {half!r}, a lone surrogate") from None
    except UnicodeDecodeError as e:
        raise wrong(f"{what} is not UTF-8 text (byte {e.start})") from None
    except RecursionError:
        raise wrong(f"{what} is nested too deeply") from None
    except ValueError as e:  # JSONDecodeError is one; so is a number of thousands of digits
        raise wrong(f"{what} is not valid JSON: {str(e).partition(';')[0]}") from None
    if not isinstance(body, dict):
        raise wrong(f"{what} is {show(body)}; a JSON object is needed")
    return body


def refuse_constant(name: str):
    raise ValueError(f"{name} is no number there")


def field(body: dict, name: str, kind: type, default=None, where: str = ""):
    """A field that is a `kind`; `default` where it is null or not there."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise wrong(f"{where}{name} is {show(value)}; {KINDS[kind]} is needed", where + name)
    return value


def needed(body: dict, name: str, kind: type, where: str = ""):
    """A field that is a `kind` and must be there."""
    value = field(body, name, kind, None, where)
    if value is None:
        raise wrong(f"{where}{name} is missing; {KINDS[kind]} is needed", where + name)
    return value
