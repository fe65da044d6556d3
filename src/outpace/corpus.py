"""Files of a user, as texts to copy drafts from: read once, then kept as token ids in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import models
from .drafters.texts import TextStore
from .errors import InputError

DEFAULT_MAX_TOKENS = 1_000_000
_MOST_BYTES_PER_TOKEN = 8  # what lies beyond the limit is not even read


def read_corpus(
    path: str | Path,
    tokenizer: Any,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    progress: models.Progress | None = None,
) -> TextStore:
    """The texts of a file, or of all UTF-8 files in a folder and its folders, the newest `max_tokens` of them.

    path: text files, or one store written by `TextStore.save`. The ids are kept in the cache folder and found again
    while neither the files nor the tokenizer change. Raises InputError where there is nothing to read.
    """
    if tokenizer is None:
        raise InputError("A corpus is text, and needs the model's tokenizer: pass tokenizer=.")
    root = Path(path).expanduser()
    name = fingerprint(tokenizer)
    if root.suffix == ".safetensors" and root.is_file():
        return TextStore.load(root, name, max_tokens)
    files = _files(root)
    facts = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    key = hashlib.sha256(json.dumps([facts, name, max_tokens]).encode()).hexdigest()[:16]
    cached = models.cache_root() / "corpora" / f"{key}.safetensors"
    if cached.is_file():
        return TextStore.load(cached, name, max_tokens)
    store = TextStore(max_tokens)
    for index, file in enumerate(files):
        if progress is not None:
            progress(f"Reading {file.name}", index, len(files))
        text = _text(file, max_tokens * _MOST_BYTES_PER_TOKEN)
        if text:
            store.add(tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(store) == 0:
        raise InputError(f"The corpus {str(path)!r} holds no UTF-8 text. Give text or code files.")
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_suffix(".partial")
        store.save(partial, name)
        partial.replace(cached)
    return store


def fingerprint(tokenizer: Any) -> str:
    """Equal for tokenizers that give equal ids to equal tokens."""
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


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
