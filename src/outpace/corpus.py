"""Files of a user, as texts to copy drafts from: read once, then kept as token ids in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import models
from .drafters.memory import DEFAULT_MAX_TOKENS, Memory, fingerprint
from .drafters.texts import TextStore
from .errors import InputError, LoadError

_TENANT = ""  # texts that belong to nobody
_MOST_BYTES_PER_TOKEN = 8  # what lies beyond the limit is not even read


def read_corpus(
    path: str | Path,
    tokenizer: Any,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    progress: models.Progress | None = None,
) -> TextStore:
    """The texts of a file, or of all UTF-8 files in a folder and its folders, the newest `max_tokens` of them.

    path: text files, or one file written by `Memory.save`. The ids are kept in the cache folder and found again
    while neither the files nor the tokenizer change. Raises InputError where there is nothing to read.
    """
    if tokenizer is None:
        raise InputError("A corpus is text, and needs the model's tokenizer: pass tokenizer=.")
    root = Path(path).expanduser()
    if root.suffix == ".safetensors" and root.is_file():
        return _stored(root, tokenizer, max_tokens)
    files, name = _files(root), fingerprint(tokenizer)
    facts = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    key = hashlib.sha256(json.dumps([facts, name, max_tokens]).encode()).hexdigest()[:16]
    cached = models.cache_root() / "corpora" / f"{key}.safetensors"
    if cached.is_file():
        with contextlib.suppress(LoadError):  # a damaged one is written again
            return _stored(cached, tokenizer, max_tokens)
    memory = Memory(max_tokens)
    for index, file in enumerate(files):
        if progress is not None:
            progress(f"Reading {file.name}", index, len(files))
        text = _text(file, max_tokens * _MOST_BYTES_PER_TOKEN)
        if text:
            memory.add(_TENANT, tokenizer(text, add_special_tokens=False)["input_ids"])
    store = memory.of(_TENANT)
    if store is None:
        raise InputError(f"The corpus {str(path)!r} holds no UTF-8 text. Give text or code files.")
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        memory.save(cached, tokenizer)
    return store


def texts_of(path: str | Path, limit: int) -> Iterator[str]:
    """The texts of a file or of the files in a folder, oldest first, at most `limit` bytes of each."""
    yield from (text for file in _files(Path(path).expanduser()) if (text := _text(file, limit)))


def _stored(file: Path, tokenizer: Any, max_tokens: int) -> TextStore:
    """The texts of a file that `Memory.save` wrote, as far as they belong to no tenant."""
    memory = Memory(max_tokens)
    memory.load(file, tokenizer)
    store = memory.of(_TENANT)
    if store is None:
        raise InputError(f"The corpus {str(file)!r} holds only texts of tenants, which are not shared.")
    return store


def _files(root: Path) -> Sequence[Path]:
    """Oldest first: what is read last is kept longest."""
    if not root.exists():
        raise InputError(f"There is no corpus {str(root)!r}: no such file or folder.")
    found = [root] if root.is_file() else [file for file in root.rglob("*") if file.is_file()]
    visible = [f for f in found if f == root or not any(part.startswith(".") for part in f.relative_to(root).parts)]
    if not visible:
        raise InputError(f"The corpus {str(root)!r} holds no files.")
    return sorted(visible, key=lambda file: (file.stat().st_mtime_ns, str(file)))


def _text(file: Path, limit: int) -> str:
    """The end of a file, at most `limit` bytes of it; nothing for a file that is not text."""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - limit))
        data = stream.read()
    if b"\0" in data:
        return ""
    try:
        # A cut may stand inside a character.
        return data.decode("utf-8") if size <= limit else data.decode("utf-8", "ignore")
    except UnicodeDecodeError:
        return ""
