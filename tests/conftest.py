"""One thread, no network, no chatter: tests run beside others and their output is read."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
