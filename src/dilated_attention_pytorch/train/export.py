"""A trained model as a folder that another library loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.train.run_folder import load_model
from dilated_attention_pytorch.train.tokenizer import Tokenizer, saved_tokenizer


def export_to_hf(run: Path, folder: Path) -> Path:
    """Write the newest model of a run and its tokenizer as a `folder` that transformers loads; returns the checkpoint.

    `run` may also be a checkpoint. The folder appears whole or not at all.
    """
    from dilated_attention_pytorch.models.hf import LongNetForCausalLM

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"--hf needs a folder that is new or empty, and {folder} is not: name another")
    folder = folder.resolve()
    if folder == Path.cwd():  # whose place the written folder would take
        raise FileExistsError("--hf cannot write the current folder: name a new one")
    found, model = load_model(run, torch.device("cpu"))
    tokenizer = _tokenizer_for_hf(saved_tokenizer(found, model.config.vocab_size))
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    unfinished.mkdir(parents=True)
    try:
        LongNetForCausalLM.from_longnet(model).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        for weights in unfinished.glob("*.safetensors"):  # which only their owner could read
            weights.chmod((unfinished / "config.json").stat().st_mode)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return found


def _tokenizer_for_hf(tokenizer: Tokenizer) -> Any:
    """The same tokenizer for transformers; every byte of a text without a tokenizer.json is a token."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    if tokenizer.content is None:
        # No character is in the vocabulary, so each falls back to its bytes.
        made = FastTokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    else:
        made = FastTokenizer.from_buffer(tokenizer.content)
        made.no_truncation()
        made.no_padding()
    return PreTrainedTokenizerFast(tokenizer_object=made)
