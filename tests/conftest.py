"""One thread, no network, no chatter: tests run beside others and their output is read."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OUTPACE_KERNELS", "stock")
os.environ.setdefault("OUTPACE_PLANNER", "off")  # how much is drafted must not depend on the clock; tests of it say so

import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """A real model: SmolLM2-135M-Instruct as a GGUF file, from the folder that OUTPACE_TEST_MODELS names."""
    folder = os.environ.get("OUTPACE_TEST_MODELS")
    files = sorted(Path(folder).glob("SmolLM2-135M-Instruct*.gguf")) if folder else []
    if not files:
        pytest.skip("OUTPACE_TEST_MODELS does not name a folder with SmolLM2-135M-Instruct as a GGUF file")
    return files[0]
