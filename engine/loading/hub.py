"""What the user calls a model -> the directory of its checkpoint, fetched from the hub if need be.

Fetched files live in the hub's own cache, shared with other tools and used as it is where there is
no network. What the files hold is not looked at here, but for the names of the weights' shards.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from engine.loading.checkpoint import INDEX, SINGLE, read_index

CONFIG = "config.json"
SMALL_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    INDEX,
)
HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)  # owner/name@revision

# The library's errors, by class: its own messages run over many lines, with links and request ids.
WHY = {
    "HFValidationError": "not a name that the hub allows",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set",
    "GatedRepoError": "its terms must be accepted on the hub first (then `hf auth login`)",
    "RepositoryNotFoundError": "no such model on the hub, or a private one (`hf auth login`)",
    "RevisionNotFoundError": "the model has no such revision",
    "LocalEntryNotFoundError": "not in the cache",
    "EntryNotFoundError": "not in the model",
}


def resolve(model: str | os.PathLike) -> Path:
    """The directory of `model`: a path to it, or a hub id `owner/name` or `owner/name@revision`.

    A directory of that name wins over the hub. ValueError, with the name, for whatever keeps the
    model from being had.
    """
    if not isinstance(model, str | os.PathLike):
        raise ValueError(f"model is {model!r}, neither a directory nor a hub id")
    asked = os.fsdecode(model)
    if os.path.isdir(asked):
        return Path(asked)
    if os.path.exists(asked):
        raise ValueError(f"model {asked!r} is a file; a checkpoint's directory is needed")
    hub_id = HUB_ID.fullmatch(asked)
    if hub_id is None or ".." in asked or "--" in hub_id[1]:
        raise ValueError(f"model {asked!r} is no directory, and no hub id (owner/name)")
    return fetch(asked, hub_id[1], hub_id[2] or "main")


def fetch(asked: str, name: str, revision: str) -> Path:
    """The snapshot of a hub model in the cache, completed from the network if there is one."""
    # Imported here alone: it takes 0.4 s, which a model on disk should not wait for.
    from huggingface_hub import HfApi, constants, hf_hub_download

    offline = ""  # why, if so
    try:
        # Asked first, and once: without a network `hf_hub_download` retries for half a minute.
        timeout = constants.HF_HUB_ETAG_TIMEOUT
        info = HfApi().model_info(name, revision=revision, timeout=timeout)
        listed = {file.rfilename for file in info.siblings or ()}
    except Exception as e:  # any: which errors its HTTP client raises differs between versions
        offline = reason(e, "no answer from the hub")

    def refusal(what: object) -> ValueError:
        return ValueError(f"model {asked!r}: {offline and offline + '; '}{what}")

    def get(file: str, revision: str) -> Path:
        try:
            local = hf_hub_download(name, file, revision=revision, local_files_only=bool(offline))
        except Exception as e:
            raise refusal(f"{file}: {reason(e, 'cannot be fetched')}") from None
        return Path(local)

    # By the revision's own name, for the cache to note its commit; the rest by that commit.
    folder = get(CONFIG, revision).parent
    if offline:
        listed = set(os.listdir(folder))
    for file in SMALL_FILES:
        if file in listed:
            get(file, folder.name)
    if SINGLE in listed:
        weights = {SINGLE}
    elif INDEX in listed:
        try:
            weights = set(read_index(folder / INDEX).values())
        except ValueError as e:
            raise refusal(e) from None
    else:
        raise refusal(f"{'its cached copy' if offline else 'it'} holds no {SINGLE} and no {INDEX}")
    for file in sorted(weights):  # last: a download that was interrupted lacks some of them
        get(file, folder.name)
    return folder


def reason(error: Exception, otherwise: str) -> str:
    """Why, in one line."""
    for kind in type(error).__mro__:
        if kind.__name__ in WHY:
            return WHY[kind.__name__]
    text = re.sub(r"For more information check: \S+", "", str(error))
    return f"{otherwise} ({type(error).__name__}: {' '.join(text.split())[:300]})"
