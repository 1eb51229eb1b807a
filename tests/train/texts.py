"""A model that writes what it is told to, with a tokenizer of bytes, for tests of what becomes of texts."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """One token for each byte, and three special ones."""
    raw = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if settings.pop("lowercase", False):
        raw.normalizer = normalizers.Lowercase()
    ends = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", **settings}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **ends)


def writing(folder: Path, text: str, **settings: Any) -> Path:
    """Save a model that draws the tokens of a text in any order, and its tokenizer; ``settings`` are for that."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(**settings)
    sizes = {"vocab_size": 259, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    ids = {"pad_token_id": 256, "bos_token_id": None, "eos_token_id": 256}
    model = PhiForCausalLM(PhiConfig(**sizes, **ids, num_attention_heads=2, max_position_embeddings=256))
    with torch.no_grad():
        model.lm_head.bias[tokenizer(text)["input_ids"]] = 20.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
