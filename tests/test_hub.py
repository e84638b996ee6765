"""Model names: directories, the hub's cache without a network, and a hub on this machine.

The hub's library reads its settings when it is imported, so each case runs in a process of its own
with its own cache; no request leaves 127.0.0.1.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.loading.checkpoint import INDEX, SINGLE
from engine.loading.hub import resolve

ROOT = Path(__file__).parent.parent
OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"  # commits

PROGRAM = """
import json, sys
from engine.loading.hub import resolve
answers = []
for model in sys.argv[1:]:
    try:
        answers.append(str(resolve(model)))
    except ValueError as e:
        answers.append({"error": str(e)})
print(json.dumps([answers, "huggingface_hub" in sys.modules]))
"""


@pytest.fixture
def run(tmp_path):
    """A function that resolves models in a new process, whose home and cache are in tmp_path."""

    def resolved(*models: str, endpoint: str, **env: str) -> list:
        ours = ("HF_", "HUGGING", "HTTP_", "HTTPS_", "ALL_", "NO_", "XDG_")
        kept = {key: v for key, v in os.environ.items() if not key.upper().startswith(ours)}
        env = {
            **kept,
            "HOME": str(tmp_path),
            "HF_HOME": str(tmp_path / "hf"),
            "HF_ENDPOINT": endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": str(ROOT),
            **env,
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *models],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)[0]

    return resolved


@pytest.fixture
def nowhere() -> str:
    """An endpoint at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


class Hub:
    """What the library needs of the hub: a model's list of files, and the files."""

    def __init__(self):
        self.models: dict[str, dict[str, dict[str, bytes]]] = {}  # name -> commit -> file -> bytes
        self.refs = {"main": NEW, "v1": OLD, NEW: NEW, OLD: OLD}
        self.gated: set[str] = set()
        self.broken = False
        self.missing_status = 404
        self.requests: list[str] = []  # "METHOD file" for files, "LIST revision" for lists
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        status, headers, body = self.reply(request)
        request.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)

    def reply(self, request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        if self.broken:
            return 500, {}, b""
        parts = request.path.split("?")[0].strip("/").split("/")
        if len(parts) < 5:
            return 404, {}, b""
        lists = parts[:2] == ["api", "models"]
        owner, model, _, revision, *rest = parts[2:] if lists else parts
        name, file = f"{owner}/{model}", "/".join(rest)
        self.requests.append(f"LIST {revision}" if lists else f"{request.command} {file}")
        if name not in self.models:
            return self.missing_status, {"X-Error-Code": "RepoNotFound"}, b""
        commit = self.refs.get(revision)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = self.models[name][commit]
        if lists:
            siblings = [{"rfilename": file} for file in files]
            return 200, {}, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode()
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        headers = {"X-Repo-Commit": commit}
        if file not in files:
            return 404, headers | {"X-Error-Code": "EntryNotFound"}, b""
        body = files[file]
        headers["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
        if wanted := request.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            part = body[int(first) : int(last) + 1 if last else None]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}"
            return 206, headers, part
        return 200, headers, body

    def files(self, method: str) -> list[str]:
        return [what.split()[1] for what in self.requests if what.startswith(method)]


@pytest.fixture
def hub():
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


TEXTS = {
    "config.json": b'{"model_type": "qwen3"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"{ }",
    "tokenizer_config.json": b"{  }",
}
CLUTTER = {
    "README.md": b"read me",
    "pytorch_model.bin": b"pickle",
    "model.gguf": b"gguf",
    "onnx/model.safetensors": b"another",
    "sub/config.json": b"{}",
    "other.safetensors": b"not listed",
}
SHARDS = {"m-1.safetensors": b"one", "m-2.safetensors": b"two"}


def index(*files: object) -> dict[str, bytes]:
    weight_map = {f"t{n}": file for n, file in enumerate(files)}
    return {INDEX: json.dumps({"weight_map": weight_map}).encode()}


def cached(home: Path, name: str, files: dict[str, bytes], commit: str = NEW) -> Path:
    """The hub's cache of a model under `home`: a ref, and a snapshot of links to blobs."""
    model = home / "hf" / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / commit
    for folder in (model / "refs", model / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text(commit)
    for file, content in files.items():
        blob = hashlib.sha256(content).hexdigest()
        (model / "blobs" / blob).write_bytes(content)
        (snapshot / file).symlink_to(Path("..") / ".." / "blobs" / blob)
    return snapshot


def held(folder: str) -> set[str]:
    return set(os.listdir(folder))


def error_of(answer: object) -> str:
    assert isinstance(answer, dict), answer
    assert "\n" not in answer["error"] and len(answer["error"]) < 500, answer
    return answer["error"]


# Directories and names


def test_a_directory(tmp_path, monkeypatch):
    """A path taken for a hub id because it looks like one."""
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name") == Path("owner/name")
    assert resolve("owner") == Path("owner")


def test_the_library_is_not_imported_for_a_directory(tmp_path):
    """0.4 s at each start for a library that a local model does not need."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == [[str(tmp_path)], False], done.stderr


@pytest.mark.parametrize(
    "model",
    [
        "",
        "gpt2",
        "./x",
        "../x",
        "/abs/x",
        "a/b/c",
        "a//b",
        "a/",
        "/b",
        "a/b/",
        "~/x",
        "a\\b",
        "a b/c",
    ]
    + ["a/b@", "@main", "a/b@x@y", "a/b@../x", "a/b@x/../y", "a/b..c", "a/b@/x", "a/b\n", "a\0/b"]
    + [".a/b", "a/.b", "a--b/c", "a/b?x", "https://host/a/b", "ä/b", "-a/b"],
)
def test_what_is_neither(model, monkeypatch):
    """A mistyped path sent to the hub as a model's name, and answered with a 404 of the network."""
    monkeypatch.setattr("engine.loading.hub.fetch", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(ValueError) as error:
        resolve(model)
    assert repr(model)[:100] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("model", [None, 3, ["a/b"], True])
def test_models_of_another_type(model):
    """TypeError, or a number taken for an open file."""
    with pytest.raises(ValueError, match="model is"):
        resolve(model)


def test_a_file(tmp_path):
    """The checkpoint file given instead of its directory: NotADirectoryError much later."""
    (tmp_path / SINGLE).touch()
    with pytest.raises(ValueError, match=f"{SINGLE}' is a file"):
        resolve(tmp_path / SINGLE)


# No network


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
@pytest.mark.parametrize("env", [{"HF_HUB_OFFLINE": "1"}, {}], ids=["offline", "no network"])
def test_cached_models_need_no_network(tmp_path, run, nowhere, env):
    """A complete model in the cache that cannot be used on a train, or only after half a minute."""
    single = cached(tmp_path, "a/single", TEXTS | {SINGLE: b"w"})
    shards = cached(tmp_path, "a/shards", TEXTS | index(*SHARDS) | SHARDS, OLD)
    bare = cached(tmp_path, "a/bare", {"config.json": b"{}", SINGLE: b"w"})  # ids only
    names = ["a/single", "a/shards", f"a/single@{NEW}", "a/bare"]
    started = time.monotonic()
    answers = run(*names, endpoint=nowhere, **env)
    assert answers == [str(single), str(shards), str(single), str(bare)]
    assert time.monotonic() - started < 10


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
@pytest.mark.parametrize("env", [{"HF_HUB_OFFLINE": "1"}, {}], ids=["offline", "no network"])
def test_incomplete_cache(tmp_path, run, nowhere, env):
    """An interrupted download opened as a model, or an error that does not say what is missing."""
    cached(tmp_path, "a/no-shard", TEXTS | index(*SHARDS) | {"m-1.safetensors": b"one"})
    cached(tmp_path, "a/no-weights", TEXTS)
    cached(tmp_path, "a/no-config", {SINGLE: b"w"})
    dangling = cached(tmp_path, "a/no-blob", TEXTS | {SINGLE: b"lost"})
    (dangling / SINGLE).resolve().unlink()
    names = ["a/no-shard", "a/no-weights", "a/no-config", "a/no-blob", "a/never", "a/no-blob@v7"]
    missing = ["m-2.safetensors", SINGLE, "config.json", SINGLE, "config.json", "config.json"]
    started = time.monotonic()
    answers = run(*names, endpoint=nowhere, **env)
    assert time.monotonic() - started < 10  # the library alone would retry for 23 s, each
    for name, file, answer in zip(names, missing, answers, strict=True):
        message = error_of(answer)
        assert repr(name) in message and file in message, message
        assert ("HF_HUB_OFFLINE" if env else "no answer from the hub") in message, message


def test_names_the_library_refuses(run, nowhere):
    """The hub's finer rules for names: the library's own exceptions let through."""
    names = ["a/b.git", "a/b-", "a/" + "b" * 100]
    for name, answer in zip(names, run(*names, endpoint=nowhere), strict=True):
        assert repr(name) in error_of(answer)


# A hub


def test_a_single_file(tmp_path, run, hub):
    """All of a repository downloaded, pickles and all; or a file that the engine needs left out."""
    hub.models["a/b"] = {NEW: TEXTS | CLUTTER | {SINGLE: b"weights"}}
    (folder,) = run("a/b", endpoint=hub.endpoint)
    assert held(folder) == {*TEXTS, SINGLE}
    assert (Path(folder) / SINGLE).read_bytes() == b"weights"
    assert Path(folder).is_relative_to(tmp_path / "hf" / "hub")
    assert sorted(hub.files("GET")) == sorted([*TEXTS, SINGLE])
    assert hub.files("GET")[-1] == SINGLE  # last: what tells a complete download


def test_shards(run, hub):
    """Shards taken from a pattern instead of the index: the wrong ones, or too many."""
    hub.models["a/b"] = {NEW: TEXTS | CLUTTER | index(*SHARDS) | SHARDS}
    (folder,) = run("a/b", endpoint=hub.endpoint)
    assert held(folder) == {*TEXTS, INDEX, *SHARDS}
    assert sorted(hub.files("GET")) == sorted([*TEXTS, INDEX, *SHARDS])
    assert hub.files("GET")[-2:] == [*SHARDS]


def test_the_single_file_wins(run, hub):
    """Twice the weights downloaded where a repository has them whole and in shards."""
    hub.models["a/b"] = {NEW: TEXTS | index(*SHARDS) | SHARDS | {SINGLE: b"weights"}}
    (folder,) = run("a/b", endpoint=hub.endpoint)
    assert SINGLE in held(folder) and not held(folder) & {*SHARDS}


def test_fetched_once(run, hub, nowhere):
    """A model downloaded again at each start, or not found again without a network."""
    hub.models["a/b"] = {NEW: TEXTS | index(*SHARDS) | SHARDS}
    (folder,) = run("a/b", endpoint=hub.endpoint)
    hub.requests.clear()
    assert run("a/b", "a/b", endpoint=hub.endpoint) == [folder, folder]
    assert hub.requests == 2 * ["LIST main", "HEAD config.json"]
    assert run("a/b", f"a/b@{NEW}", endpoint=nowhere) == [folder, folder]
    assert run("a/b", endpoint=hub.endpoint, HF_HUB_OFFLINE="1") == [folder]
    hub.broken = True
    assert run("a/b", endpoint=hub.endpoint) == [folder]


def test_interrupted_download_goes_on(run, hub, nowhere):
    """What an interrupted download left is taken for the model."""
    whole = TEXTS | index(*SHARDS) | SHARDS
    hub.models["a/b"] = {NEW: {k: v for k, v in whole.items() if k != "m-2.safetensors"}}
    (answer,) = run("a/b", endpoint=hub.endpoint)
    assert "m-2.safetensors: not in the model" in error_of(answer)
    (answer,) = run("a/b", endpoint=nowhere)
    assert "m-2.safetensors: not in the cache" in error_of(answer)
    hub.models["a/b"][NEW] = whole
    hub.requests.clear()
    (folder,) = run("a/b", endpoint=hub.endpoint)
    assert held(folder) == {*whole}
    assert hub.files("GET") == ["m-2.safetensors"]


def test_revisions(run, hub, nowhere):
    """Another revision's files served, or files of two revisions mixed."""
    hub.models["a/b"] = {
        NEW: TEXTS | {SINGLE: b"new"},
        OLD: {"config.json": b"{}", SINGLE: b"old"},
    }
    names = ["a/b", "a/b@main", "a/b@v1", f"a/b@{OLD}"]
    folders = run(*names, endpoint=hub.endpoint)
    assert [Path(folder).name for folder in folders] == [NEW, NEW, OLD, OLD]
    assert (Path(folders[0]) / SINGLE).read_bytes() == b"new"
    assert (Path(folders[2]) / SINGLE).read_bytes() == b"old"
    assert held(folders[2]) == {"config.json", SINGLE}
    assert run(*names, endpoint=nowhere) == folders


@pytest.mark.parametrize("status", [404, 401])
def test_no_such_model(run, hub, status):
    """Six lines of advice with a link for a mistyped name."""
    hub.missing_status = status
    (answer,) = run("a/mistyped", endpoint=hub.endpoint)
    assert "'a/mistyped': no such model on the hub" in error_of(answer)


def test_no_such_revision(run, hub):
    """A mistyped revision answered with another one."""
    hub.models["a/b"] = {NEW: TEXTS | {SINGLE: b"w"}}
    hub.models["a/b"][OLD] = hub.models["a/b"][NEW]
    run("a/b", endpoint=hub.endpoint)
    (answer,) = run("a/b@v7", endpoint=hub.endpoint)
    assert "'a/b@v7': the model has no such revision" in error_of(answer)


def test_a_gated_model(run, hub):
    """A licence that was not accepted is reported as a network error."""
    hub.models["a/b"] = {NEW: TEXTS | {SINGLE: b"w"}}
    hub.gated.add("a/b")
    (answer,) = run("a/b", endpoint=hub.endpoint)
    assert "'a/b'" in error_of(answer) and "terms must be accepted" in error_of(answer)


def test_a_broken_hub(run, hub):
    """An outage of the hub: a traceback of the HTTP client."""
    hub.broken = True
    (answer,) = run("a/b", endpoint=hub.endpoint)
    assert "no answer from the hub" in error_of(answer) and "500" in error_of(answer)


def test_models_without_safetensors(run, hub):
    """A model of pickles only, or a repository of something else."""
    hub.models["a/pickles"] = {NEW: TEXTS | {"pytorch_model.bin": b"pickle"}}
    hub.models["a/empty"] = {NEW: {"README.md": b"hello"}}
    pickles, empty = run("a/pickles", "a/empty", endpoint=hub.endpoint)
    assert SINGLE in error_of(pickles) and INDEX in error_of(pickles)
    assert "config.json: not in the model" in error_of(empty)
    assert "pytorch_model.bin" not in hub.files("GET")


@pytest.mark.parametrize("file", ["../../x.safetensors", "/etc/x.safetensors", "README.md", 3])
def test_a_hostile_index(run, hub, file):
    """An index that has files fetched which are not weights, or written outside of the cache."""
    hub.models["a/b"] = {NEW: TEXTS | CLUTTER | index(file)}
    (answer,) = run("a/b", endpoint=hub.endpoint)
    assert INDEX in error_of(answer) and repr(file) in error_of(answer)
    assert hub.files("GET") and {*hub.files("GET")} == {*TEXTS, INDEX}


def test_an_index_of_another_form(run, hub):
    """A damaged index: a traceback in the middle of a download."""
    hub.models["a/b"] = {NEW: TEXTS | {INDEX: b"{"}}
    hub.models["a/c"] = {NEW: TEXTS | {INDEX: b'{"weight_map": 3}'}}
    for answer in run("a/b", "a/c", endpoint=hub.endpoint):
        assert INDEX in error_of(answer)


def test_a_cache_that_cannot_be_written(tmp_path, run, hub):
    """PermissionError or its like as a traceback: here the cache's directory is a file."""
    hub.models["a/b"] = {NEW: TEXTS | {SINGLE: b"w"}}
    (tmp_path / "hf").touch()
    (answer,) = run("a/b", endpoint=hub.endpoint)
    assert "'a/b'" in error_of(answer) and "cannot be fetched" in error_of(answer)


class Info:
    siblings = ()


def test_a_full_disk(monkeypatch):
    """OSError as a traceback; the message must keep the system's words."""

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *args, **kwargs: Info)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with pytest.raises(ValueError, match="'a/b': config.json: .*No space left on device"):
        resolve("a/b")


@pytest.mark.parametrize("where", ["HfApi.model_info", "hf_hub_download"])
def test_control_c(monkeypatch, where):
    """An interrupt swallowed in the middle of a long download."""

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *args, **kwargs: Info)
    monkeypatch.setattr(f"huggingface_hub.{where}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve("a/b")
