"""What ended requests wrote, to copy later drafts from: bounded, apart for every tenant, saved and loaded."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import save_file

from ..errors import InputError, LoadError
from .texts import TextStore

_FORMAT = "outpace-texts"
DEFAULT_MAX_TOKENS = 1_000_000


class Memory:
    """Texts by tenant. A request finds those of its own tenant only (`SamplingParams.tenant`).

    max_tokens: of all tenants together; beyond it the tenant that wrote least recently is forgotten, and of a single
    tenant the oldest texts.

        memory = outpace.Memory()
        engine = outpace.load(model, memory=memory)
        memory.load("answers.safetensors", engine.tokenizer)
        ...
        memory.save("answers.safetensors", engine.tokenizer)
    """

    def __init__(self, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise InputError(f"max_tokens of a memory must be a whole number, 1 or larger, got {max_tokens!r}.")
        self.max_tokens = max_tokens
        self._stores: OrderedDict[str, TextStore] = OrderedDict()  # the tenant that wrote last is last

    def __len__(self) -> int:
        return sum(len(store) for store in self._stores.values())

    def of(self, tenant: str) -> TextStore | None:
        """The texts of a tenant; None where nothing is known."""
        return self._stores.get(tenant)

    def add(self, tenant: str, tokens: Sequence[int]) -> None:
        """Remember a text, [length] token ids."""
        if tenant not in self._stores:
            self._stores[tenant] = TextStore(self.max_tokens)
        self._stores[tenant].add(tokens)
        self._stores.move_to_end(tenant)
        self._evict()

    def forget(self, tenant: str) -> None:
        """Forget all texts of a tenant."""
        self._stores.pop(tenant, None)

    def _evict(self) -> None:
        while len(self._stores) > 1 and len(self) > self.max_tokens:
            self._stores.popitem(last=False)

    def save(self, path: str | Path, tokenizer: Any) -> None:
        """Write a safetensors file: one tensor of int32 ids per tenant, and a mark of the tokenizer."""
        file = Path(path).expanduser()
        tensors = {str(index): store.tokens() for index, store in enumerate(self._stores.values())}
        metadata = {"format": _FORMAT, "tokenizer": fingerprint(tokenizer), "tenants": json.dumps(list(self._stores))}
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(file.name + ".partial")
        save_file(tensors, str(partial), metadata)
        partial.replace(file)

    def load(self, path: str | Path, tokenizer: Any) -> None:
        """Take what `save` wrote in place of what is here. Raises LoadError for another file or another tokenizer."""
        file = Path(path).expanduser()
        stores = OrderedDict()
        try:
            with safe_open(str(file), "numpy") as opened:
                metadata = opened.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise LoadError(f"{str(path)!r} holds no texts of outpace. Give a file that was written by it.")
                if metadata.get("tokenizer") != fingerprint(tokenizer):
                    raise LoadError(f"{str(path)!r} holds token ids of another tokenizer. Delete it, or give another.")
                for index, tenant in enumerate(json.loads(metadata["tenants"])):
                    stores[tenant] = TextStore.of_tokens(opened.get_tensor(str(index)), self.max_tokens)
        except LoadError:
            raise
        except Exception as error:
            raise LoadError(f"The texts in {str(path)!r} cannot be read: {error}") from error
        self._stores = stores
        self._evict()


def fingerprint(tokenizer: Any) -> str:
    """Equal for tokenizers that give equal ids to equal tokens."""
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
