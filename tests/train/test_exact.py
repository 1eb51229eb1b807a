"""A response has the same log-probs alone, in a batch and beside the end of a longer one; other models are refused."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, Phi3Config, Phi3ForCausalLM

from rlstab.config.settings import RolloutSettings
from rlstab.errors import ModelError
from rlstab.models.decoding import require_batches, require_decoding
from rlstab.models.policy import Policy, Sequences, load_policy, require_saved
from rlstab.tasks import Example
from tests.train.runs import go, small
from tests.train.texts import byte_tokenizer

#: Architectures of transformers that forward a row as if the others were not there.
ARCHITECTURES = """
    afmoe apertus arcee bamba bitnet bloom cohere cohere2 diffllama doge ernie4_5 ernie4_5_moe exaone4 falcon falcon_h1
    flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss granite granitemoe
    granitemoehybrid helium hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe lfm2 llama llama4_text mamba minimax ministral
    mistral mixtral mpt nemotron nemotron_h olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
    qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm starcoder2
""".split()
#: Their settings under all names that they have.
TINY: dict[str, Any] = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_experts_per_tok", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "sliding_window"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("head_dim", "mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim"), 8),
    **{"linear_value_head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "mamba_expand": 2},
    **{"n_group": 1, "topk_group": 1, "n_groups": 1, "mamba_d_ssm": 64, "moe_layer_start_index": 0},
    **{"vocab_size": 259, "max_position_embeddings": 256, "n_positions": 256, "tie_word_embeddings": False},
    "moe_shared_expert_intermediate_size": 16,
}
OF: dict[str, dict[str, Any]] = {"nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba"]}}
SHORT, LONG = Example("1+1?", ""), Example("What is the sum of 12 and 35?", "")


def wide(model: Any) -> Any:
    """The model with larger matrices, so that its log-probs depend on its input."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(3)
    return model.eval()


def policy_of(kind: str) -> Policy:
    cls: Any = CONFIG_MAPPING[kind]
    names = {name for base in cls.__mro__ for name in (*vars(base).get("__annotations__", ()), *parameters(base))}
    settings = {name: value for name, value in TINY.items() if name in names} | OF.get(kind, {})
    torch.manual_seed(0)
    model = wide(AutoModelForCausalLM.from_config(cls(**settings), dtype=torch.float32))
    return Policy(model, byte_tokenizer(), 256, frozenset({256}), "fp32")


def parameters(cls: type) -> list[str]:
    return list(inspect.signature(cls.__init__).parameters) if "__init__" in vars(cls) and cls is not object else []


def drawn(prompts: list[int], responses: list[int]) -> Sequences:
    """Rows of random tokens."""
    generator = torch.Generator().manual_seed(1)
    kept, width, length = [], max(prompts), max(responses)
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.randint(0, 250, (prompt + response,), generator=generator)
        row = torch.full((width + length,), 256)
        row[width - prompt : width + response] = ids
        kept.append(row)
    rows = torch.stack(kept)
    mask = torch.zeros_like(rows, dtype=torch.bool)
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        mask[index, width - prompt : width + response] = True
    return Sequences(rows[:, :width], mask[:, :width], rows[:, width:], mask[:, width:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_architecture_is_the_same_alone_in_a_batch_and_in_a_checkpoint(tmp_path: Path, kind: str) -> None:
    policy, rows = policy_of(kind), drawn([3, 20, 9, 30], [12, 4, 25, 8])
    alone, together = (policy.evidence(rows, {"logprobs"}, size, temperature=1.0)["logprobs"] for size in (1, 4))
    assert alone[rows.response_mask].std() > 0.01
    assert float((alone - together).abs().max()) < 5e-6
    require_batches(policy, kind, (drawn([3, 30], [4, 4]), drawn([3, 30], [4, 40])), 1.0)
    policy.save(tmp_path, weights=False)  # some have a class of tokenizers, which reads any in its own way
    loaded = replace(policy, tokenizer=AutoTokenizer.from_pretrained(tmp_path))
    require_saved(loaded, kind, [SHORT, LONG], RolloutSettings())


def longrope(folder: Path, original: int, scale: float = 8.0) -> Path:
    """A model with short factors up to a number of tokens, and long ones beyond."""
    torch.manual_seed(0)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {**{name: TINY[name] for name in names}, "num_key_value_heads": 4, "pad_token_id": 256}
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, scale]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": original}
    config = Phi3Config(**sizes, **lengths, bos_token_id=None, eos_token_id=256, rope_parameters=rope)
    wide(wide(Phi3ForCausalLM(config))).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def decodes(policy: Policy, *examples: Example, **settings: Any) -> None:
    require_decoding(policy, "here", examples, RolloutSettings(**{"max_new_tokens": 24, **settings}))


def test_longrope_is_refused_where_the_longest_row_decides(tmp_path: Path) -> None:
    policy = load_policy(str(longrope(tmp_path / "model", 40)))
    told = r"\(model_type 'phi3'\) .* rollout.max_new_tokens, now 53 together"
    with pytest.raises(ModelError, match=told):
        decodes(policy, SHORT, LONG)
    with pytest.raises(ModelError, match="'phi3'"):  # the end of one row alone
        decodes(policy, LONG, LONG)
    with pytest.raises(ModelError, match="'phi3'"):  # hidden by the rounding of bfloat16
        decodes(replace(policy, precision="bf16"), SHORT, LONG)
    decodes(policy, SHORT, LONG, max_new_tokens=11)  # always short
    decodes(load_policy(str(longrope(tmp_path / "long", 3))), SHORT, LONG)  # always long


@pytest.mark.parametrize(
    "changed",
    [
        lambda hidden: hidden + 0.01 * hidden.mean(0, keepdim=True),  # a statistic of the batch
        lambda hidden: hidden * (1 + 0.001 * hidden.shape[1]),  # its padded width
        lambda hidden: hidden / (1 + hidden.abs().amax() / 100),  # a scale of all values, as of a quantised activation
        lambda hidden: hidden if hidden.shape[1] < 40 else 1.01 * hidden,  # only at the full length
        lambda hidden: hidden.cumsum(1) / torch.arange(1, 1 + hidden.shape[1])[:, None],  # padding on the left
    ],
    ids=["mean", "width", "scale", "length", "padding"],
)
def test_a_model_whose_batch_changes_the_result_is_refused(changed: Any) -> None:
    policy = policy_of("llama")
    decodes(policy, SHORT, LONG)
    policy.model.get_decoder().layers[0].register_forward_hook(lambda module, inputs, output: changed(output))
    with pytest.raises(ModelError, match=r"'here' \(model_type '\w+'\) gives a response other log-probs"):
        decodes(policy, SHORT, LONG)


def test_a_reference_is_held_to_the_same(tmp_path: Path) -> None:
    run = small(tmp_path / "run", ["clip_higher", "kl"], model__reference=str(longrope(tmp_path / "model", 12)))
    with pytest.raises(ModelError, match=r"model_type 'phi3'.* now 15 together"):
        go(run)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
