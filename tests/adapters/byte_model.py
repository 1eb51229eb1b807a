"""A tiny model that reads bytes, whose tokenizer has a chat template: it can be made to write any conversation."""

from pathlib import Path

import torch


def write_model(folder: Path, template: str) -> None:
    """Write the model and its tokenizer, whose first tokens are the padding and those around a message."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    fast = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token=special[0], eos_token=special[2])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(vocab_size=len(words), max_position_embeddings=2048, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)
