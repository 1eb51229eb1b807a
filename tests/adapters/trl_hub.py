"""Tiny random models under the names that TRL's tests have, in a folder like the hub's cache; and their data set.

As a plugin of pytest it gives the tests the data set.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    set_seed,
)

OWNER, ZEN = "trl-internal-testing", "trl-internal-testing/zen"
#: By name, the architecture; and which of them give one score instead of logits.
MODELS = {
    "tiny-Qwen2ForCausalLM-2.5": "qwen2",
    "tiny-Qwen2ForSequenceClassification-2.5": "qwen2",
    "tiny-Qwen3ForCausalLM": "qwen3",
    "tiny-Qwen3ForSequenceClassification": "qwen3",
    "tiny-Qwen3MoeForCausalLM": "qwen3_moe",
    "tiny-LlamaForCausalLM-3.2": "llama",
    "tiny-LlamaForSequenceClassification-3.2": "llama",
    "tiny-MistralForCausalLM-0.2": "mistral",
}
SIZES = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
TEXTS = [
    *("What is worse than ugly?", "Which is better: simple or complex?", "How are namespaces?", "What counts here?"),
    *("Flat or nested, which one?", "When is now better than never?", "What about special cases?", "Is it a bad idea?"),
    *(
        "What should errors never do?",
        "How many ways are there to do it?",
        "May it be implicit?",
        "What of sparse code?",
    ),
    *(
        "Who explains it?",
        "What beats purity?",
        "What to refuse in ambiguity?",
        "How obvious may a way be at first?",
        "So?",
    ),
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_load: Callable[..., Any] = datasets.load_dataset


def make(hub: Path) -> None:
    """Write the models, each with a tokenizer, as the hub's cache has them."""
    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    bytewise.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    for name, architecture in MODELS.items():
        set_seed(0)
        scores = "SequenceClassification" in name
        config = AutoConfig.for_model(
            architecture,
            **SIZES,
            **(EXPERTS if architecture.endswith("moe") else {}),
            **({"num_labels": 1} if scores else {}),
            num_key_value_heads=2,
            vocab_size=len(tokenizer),
            head_dim=2,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        entry = hub / f"models--{OWNER}--{name}"
        (entry / "refs").mkdir(parents=True)
        (entry / "refs" / "main").write_text("0")
        for part in (auto.from_config(config), tokenizer):
            part.save_pretrained(entry / "snapshots" / "0")


def load(path: str, name: str | None = None, split: str | None = None, **options: Any) -> Any:
    """:func:`datasets.load_dataset`, which finds the data set here."""
    if path != ZEN:
        return _load(path, name, split=split, **options)
    conversational = str(name).startswith("conversational")
    prompts = [[{"role": "user", "content": text}] if conversational else text for text in TEXTS]
    made = datasets.Dataset.from_dict({"prompt": prompts}).train_test_split(test_size=2, shuffle=False)
    if options.get("streaming"):
        made = datasets.IterableDatasetDict({part: rows.to_iterable_dataset() for part, rows in made.items()})
    return made if split is None else made[split]


datasets.load_dataset = load
