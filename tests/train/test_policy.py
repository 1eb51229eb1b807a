"""The policy: what cannot be used is refused with its reason, and padding does not exist for the signals."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from rlstab.config.settings import RolloutSettings
from rlstab.errors import ConfigError, DataError, ModelError
from rlstab.tasks import Countdown, Example, Message
from rlstab.train.padded_rows import Sequences, position_ids
from rlstab.train.policy import SHIPPED, Policy, load_policy
from rlstab.train.prompts import require_prompts
from tests.tolerances import depth, rounding

GIVE = (
    "Give a folder that holds a transformers model with safetensors weights and its tokenizer, a name on the model "
    "hub, or one of: chain-tiny, countdown-tiny, littered-tiny."
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Offline, and any attempt to connect is an error of its own."""

    def refuse(*_):
        raise AssertionError("the network was tried")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("countdown-tiny")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the shipped model in the working directory, with some keys of its JSON files changed."""
    monkeypatch.chdir(tmp_path)

    def copy(**files: dict[str, object]) -> str:
        shutil.copytree(SHIPPED["countdown-tiny"], "model")
        for name, changes in files.items():
            path = Path(f"model/{name}.json")
            kept = json.loads(path.read_text()) | changes
            path.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
        return "./model"

    return copy


class Session:
    """One of the hub's, which answers or does not, and notes what it was asked."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.asked = error, list[tuple[str, float]]()

    def head(self, url: str, *, timeout: float) -> None:
        self.asked.append((url, timeout))
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("name", ["someorg/no-such-model", "no-such-model"])
def test_a_hub_that_does_not_answer_is_asked_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(OSError("[Errno -3] Temporary failure in name resolution"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: session)
    start = time.monotonic()
    said = refusal(name)
    assert time.monotonic() - start < 5
    assert said == (
        f"the tokenizer of '{name}' cannot be loaded: https://huggingface.co cannot be reached: [Errno -3] Temporary "
        f"failure in name resolution. {GIVE}"
    )
    assert session.asked == [("https://huggingface.co", 5.0)]


def test_a_hub_that_does_not_answer_is_not_needed_for_what_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(OSError("down"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: session)
    cache = tmp_path / "models--someorg--tiny"
    shutil.copytree(SHIPPED["countdown-tiny"], cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    for place in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(place, str(tmp_path))
    assert load_policy("someorg/tiny").pad_id == load_policy("countdown-tiny").pad_id
    assert len(session.asked) == 1


def test_folders_and_shipped_models_do_not_ask_the_hub(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: session)
    load_policy("countdown-tiny")
    load_policy(folder())
    assert session.asked == []


def refusal(name: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_policy(name)
    return str(caught.value)


def test_a_name_that_nobody_knows():
    assert refusal("nobody/no-such-model") == (
        "the tokenizer of 'nobody/no-such-model' cannot be loaded: We couldn't connect to 'https://huggingface.co' to "
        f"load the files, and couldn't find them in the cached files. {GIVE}"
    )


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "~/none/at/all", "../none"])
def test_a_folder_that_is_not_there(name):
    assert refusal(name) == f"there is no folder '{Path(name).expanduser()}'. {GIVE}"


def test_a_folder_without_a_tokenizer(folder):
    name = folder()
    Path("model/tokenizer.json").unlink()
    assert refusal(name).startswith("the tokenizer of './model' cannot be loaded: Couldn't instantiate the backend")


def test_a_folder_without_weights(folder):
    name = folder()
    Path("model/model.safetensors").unlink()
    assert refusal(name) == (
        "the weights of './model' cannot be loaded: Error no file named model.safetensors found in directory model. "
        f"{GIVE}"
    )


def test_weights_of_another_format_are_not_read(folder):
    name = folder()
    torch.save(load_file("model/model.safetensors"), "model/pytorch_model.bin")
    Path("model/model.safetensors").unlink()
    assert "Error no file named model.safetensors" in refusal(name)


@pytest.mark.parametrize("content", [b"", b"junk junk junk", b"\x80\x04cposix\nsystem\n."])
def test_damaged_weights(folder, content):
    name = folder()
    Path("model/model.safetensors").write_bytes(content)
    assert re.fullmatch(
        rf"the weights of '\./model' cannot be loaded: Error while deserializing header: .*\. {re.escape(GIVE)}",
        refusal(name),
    )


def test_weights_that_are_not_all_there(folder):
    name = folder()
    weights = load_file("model/model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, "model/model.safetensors", {"format": "pt"})
    assert refusal(name) == (
        "the model './model' has no weights for model.norm.weight; they would be random. Give a model that was saved "
        "as a causal language model."
    )


def test_weights_of_another_size(folder):
    assert "the weights of './model' cannot be loaded: " in refusal(folder(config={"hidden_size": 48}))


def test_a_model_that_is_no_language_model(folder):
    assert "the weights of './model' cannot be loaded: Unrecognized configuration class" in refusal(
        folder(config={"model_type": "vit"})
    )


def test_damaged_configuration(folder):
    name = folder()
    Path("model/config.json").write_text("{")
    assert refusal(name) == (
        "the tokenizer of './model' cannot be loaded: It looks like the config file at 'model/config.json' is not a "
        f"valid JSON file. {GIVE}"
    )


def test_code_that_comes_with_a_model_is_not_run(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    name = folder(config={"auto_map": {"AutoConfig": "code.Config"}, "model_type": "own"})
    Path("model/code.py").write_text("import pathlib; pathlib.Path('ran').touch()\nclass Config: pass\n")
    assert "cannot be loaded: The repository model contains custom code" in refusal(name)
    assert not Path("ran").exists()


def test_a_tokenizer_without_a_pad_token(folder):
    assert refusal(folder(tokenizer_config={"pad_token": None}, tokenizer={"padding": None})) == (
        "the tokenizer of './model' has no pad token, and prompts are padded on the left. Set one and save it: "
        "tokenizer.pad_token = tokenizer.eos_token; tokenizer.save_pretrained(folder)."
    )


WITHOUT_END = {"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": None}}


def test_a_model_without_an_end(folder):
    assert refusal(folder(tokenizer_config={"eos_token": None}, **WITHOUT_END)) == (
        "'./model' has no EOS token, so no response would ever end. Set tokenizer.eos_token to the token that ends an "
        "answer and save the tokenizer."
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {19}),
        (WITHOUT_END, {19}),
        ({"tokenizer_config": {"eos_token": None}}, {19}),
        ({"generation_config": {"eos_token_id": [5, 7]}}, {5, 7, 19}),
        ({"generation_config": {"eos_token_id": 5}}, {5, 19}),
    ],
)
def test_the_end_may_be_named_by_tokenizer_or_model(folder, files, expected):
    assert load_policy(folder(**files)).eos_ids == expected


def test_what_is_saved_loads_as_the_same_policy(policy, tmp_path):
    policy.save(tmp_path / "saved")
    again = load_policy(str(tmp_path / "saved"))
    for (name, one), (other, two) in zip(policy.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(one, two)
    assert (again.pad_id, again.eos_ids, again.context_length) == (0, {19}, 128)
    assert again.encode(["1,2>3"], 1, chat=False)[0].tolist() == policy.encode(["1,2>3"], 1, chat=False)[0].tolist()
    assert not list((tmp_path / "saved").glob("*.bin"))


def test_a_policy_is_float32_and_without_dropout(folder):
    name = folder(config={"attention_dropout": 0.5, "dtype": "bfloat16"})
    weights = {key: value.bfloat16() for key, value in load_file("model/model.safetensors").items()}
    save_file(weights, "model/model.safetensors", {"format": "pt"})
    loaded = load_policy(name)
    assert {one.dtype for one in loaded.model.parameters()} == {torch.float32}
    assert not loaded.model.training


# prompts


def test_prompts_are_padded_on_the_left(policy):
    ids, mask = policy.encode(["12", "1,2>3"], 4, chat=False)
    assert ids.tolist() == [[0, 0, 0, 2, 3], [2, 15, 3, 16, 4]]
    assert mask.tolist() == [[False, False, False, True, True], [True] * 5]


def test_no_prompt_is_fine(policy):
    ids, mask = policy.encode([], 4, chat=False)
    assert ids.shape == mask.shape == (0, 0)


def test_a_prompt_may_fill_the_context_exactly(policy):
    assert policy.encode(["1" * 100], 28, chat=False)[0].shape == (1, 100)


def test_a_prompt_that_leaves_no_room(policy):
    with pytest.raises(DataError) as caught:
        policy.encode(["1", "1" * 101], 28, chat=False)
    assert str(caught.value) == (
        f"a prompt of 101 tokens and 28 new ones exceed the model's context of 128: '{'1' * 60}'... Lower "
        "rollout.max_new_tokens, shorten the prompts, or take a model with a longer context."
    )


def test_a_model_that_states_no_context_takes_any_prompt(policy):
    boundless = dataclasses.replace(policy)
    boundless.__dict__["context_length"] = None
    assert boundless.encode(["1" * 1000], 28, chat=False)[0].shape == (1, 1000)


def test_an_empty_prompt(policy):
    with pytest.raises(DataError) as caught:
        policy.encode(["1", ""], 4, chat=False)
    assert str(caught.value) == "a prompt has no token: ''. Give the task a prompt_template with text."


def test_a_prompt_with_a_character_that_the_tokenizer_does_not_know(policy):
    with pytest.raises(DataError) as caught:
        policy.encode(["1", "1 \u00e9"], 4, chat=False)
    assert str(caught.value) == (
        f"the tokenizer of '{SHIPPED['countdown-tiny']}' cannot encode the prompt '1 \u00e9': WordLevel error: Missing "
        "[UNK] token from the vocabulary. Change the prompts, or take another model."
    )


def test_chat_without_a_template(policy):
    with pytest.raises(DataError) as caught:
        policy.encode(["1"], 4, chat=True)
    assert str(caught.value) == (
        f"the tokenizer of '{SHIPPED['countdown-tiny']}' cannot encode the prompt '1': Cannot use chat template "
        "functions because tokenizer.chat_template is not set and no template argument was passed. Set rollout.chat to "
        "false, or take another model."
    )


def test_chat_wraps_the_prompt(folder):
    template = "{% for one in messages %}={{ one['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    loaded = load_policy(folder(tokenizer_config={"chat_template": template}))
    wrapped, plain = loaded.encode(["12"], 4, chat=True)[0], loaded.encode(["=12>"], 4, chat=False)[0]
    assert wrapped.tolist() == plain.tolist()


CHAT = (Message("system", "1"), Message("user", "2"))
ROLES = (
    "{% for one in messages %}{% if one['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ {'system': '*', 'user': '='}[one['role']] }}{{ one['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def test_messages_go_through_the_template_as_they_are(folder):
    loaded = load_policy(folder(tokenizer_config={"chat_template": ROLES}))
    chat, plain = loaded.encode([CHAT, "2"], 4, chat=True)[0], loaded.encode(["*1=2>", "=2>"], 4, chat=False)[0]
    assert chat.tolist() == plain.tolist()


def test_messages_without_chat(policy):
    with pytest.raises(DataError) as caught:
        policy.encode(["1", CHAT], 4, chat=False)
    assert str(caught.value) == (
        "a prompt is a list of messages, which only a chat template can write as tokens: 'system: 1\\nuser: 2'. Set "
        "rollout.chat to true."
    )


class Chats(Countdown):
    """Countdown whose training prompts are chats of digits that the shipped tokenizer knows."""

    def __init__(self, *chat: Message) -> None:
        self.chat = chat
        super().__init__()

    def example(self, split, index):
        return Example.chat(self.chat, None) if split == "train" else super().example(split, index)


def test_the_first_prompts_are_tried_at_the_start(folder, policy):
    plain, chats = RolloutSettings(), RolloutSettings(chat=True)
    require_prompts(policy, Countdown(), plain)
    with pytest.raises(ConfigError) as config:
        require_prompts(policy, Chats(*CHAT), plain)
    assert str(config.value) == (
        "the prompts of the task 'countdown' are lists of messages, which only a chat template can write as tokens. "
        "Set rollout.chat to true, or make the prompts text and leave `system` out."
    )
    with pytest.raises(ModelError) as model:
        require_prompts(policy, Chats(*CHAT), chats)
    assert str(model.value) == (
        f"rollout.chat is true, and the tokenizer of '{SHIPPED['countdown-tiny']}' has no chat template. Take a model "
        "that was trained on chats, or make the prompts text and set rollout.chat to false."
    )
    with_template = load_policy(folder(tokenizer_config={"chat_template": ROLES}))
    require_prompts(with_template, Chats(*CHAT), chats)
    with pytest.raises(DataError, match=r"cannot encode the prompt 'tool: 3': no tools\. Change the prompts, or take"):
        require_prompts(with_template, Chats(Message("tool", "3")), chats)
    with pytest.raises(DataError, match="exceed the model's context"):
        require_prompts(policy, Countdown(), RolloutSettings(max_new_tokens=128))


# signals

PROMPTS = ["1,2>3", "12,3,4,5>6", "7", "1,2>3"]
RESPONSES = ["1+2", "9", "1+2*3-4+5", ""]


def sequences(policy: Policy) -> Sequences:
    ids, mask = policy.encode(PROMPTS, 12, chat=False)
    rows = [policy.tokenizer(text)["input_ids"] + [19] for text in RESPONSES]
    width = max(map(len, rows)) + 2  # no row is full
    return Sequences(
        ids,
        mask,
        torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows]),
    )


@torch.no_grad()
def alone(policy: Policy, row: int, temperature: float) -> torch.Tensor:
    """Log-probs of a response, from the model on that one sequence without padding or mask."""
    prompt = policy.tokenizer(PROMPTS[row])["input_ids"]
    response = policy.tokenizer(RESPONSES[row])["input_ids"] + [19]
    logits = policy.model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1)


NEEDS = {"logprobs", "entropies"}
#: Bound on the logits of both models on these sequences.
LOGIT = 16.0


def near(policy: Policy, temperature: float = 1.0) -> dict[str, float]:
    return {"rtol": 0, "atol": rounding(torch.float32, LOGIT / temperature, depth(policy.model, 24))}


@pytest.fixture(scope="module")
def absolute(policy) -> Policy:
    """A random model whose positions are absolute, so that padding would shift them."""
    torch.manual_seed(0)
    shape = {"vocab_size": 29, "n_positions": 128, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.3, bos_token_id=None, eos_token_id=19))
    return dataclasses.replace(policy, model=model.eval())


@pytest.fixture(params=["policy", "absolute"])
def either(request) -> Policy:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_padded_rows_have_the_signals_of_single_rows(either, temperature):
    batch = sequences(either)
    index = batch.response_mask.reshape(-1).nonzero().squeeze(-1)
    with torch.no_grad():
        found = either.signals(batch, index, temperature=temperature, needs=NEEDS, options={})
    expected = [alone(either, row, temperature) for row in range(len(PROMPTS))]
    tokens = batch.response_ids.reshape(-1)[index]
    distribution = torch.cat(expected)
    close = near(either, temperature)
    torch.testing.assert_close(found.logprobs.double(), distribution.gather(-1, tokens[:, None])[:, 0], **close)
    torch.testing.assert_close(found.entropies.double(), -(distribution.exp() * distribution).sum(-1), **close)


def test_what_stands_in_the_padding_does_not_matter(either):
    batch = sequences(either)
    index = batch.response_mask.reshape(-1).nonzero().squeeze(-1)
    other = dataclasses.replace(
        batch,
        prompt_ids=torch.where(batch.prompt_mask, batch.prompt_ids, 7),
        response_ids=torch.where(batch.response_mask, batch.response_ids, 9),
    )
    options = {"temperature": 1.0, "needs": NEEDS, "options": {}}
    with torch.no_grad():
        one, two = (either.signals(which, index, **options) for which in (batch, other))
    torch.testing.assert_close(one.logprobs, two.logprobs, **near(either))
    torch.testing.assert_close(one.entropies, two.entropies, **near(either))


def test_only_the_tokens_of_the_index_are_given_in_its_order(policy):
    batch = sequences(policy)
    index = batch.response_mask.reshape(-1).nonzero().squeeze(-1)
    options = {"temperature": 1.0, "needs": {"logprobs"}, "options": {}}
    with torch.no_grad():
        whole = policy.signals(batch, index, **options).logprobs
        some = policy.signals(batch, index[[5, 0, 2]], **options).logprobs
    torch.testing.assert_close(some, whole[[5, 0, 2]], **near(policy))


def test_options_and_rows_reach_the_signals(policy):
    batch = sequences(policy)
    index = batch.response_mask.reshape(-1).nonzero().squeeze(-1)
    rows = torch.arange(len(index)) % 2 == 0
    with torch.no_grad():
        found = policy.signals(
            batch,
            index,
            temperature=1.0,
            needs={"log_kept_mass", "max_logprobs"},
            options={"min_p": 1.0},
            rows={"log_kept_mass": rows},
        )
    # with min_p 1 the likeliest token alone is kept
    torch.testing.assert_close(found.log_kept_mass, found.max_logprobs * rows, **near(policy))
    assert found.logprobs is None


def test_bfloat16_is_autocast_over_float32_weights(policy):
    batch = sequences(policy)
    index = batch.response_mask.reshape(-1).nonzero().squeeze(-1)
    options = {"temperature": 1.0, "needs": {"logprobs"}, "options": {}}
    with torch.no_grad():
        narrow = dataclasses.replace(policy, precision="bf16").signals(batch, index, **options).logprobs
        wide = policy.signals(batch, index, **options).logprobs
    assert narrow.dtype == torch.float32
    assert not torch.equal(narrow, wide)
    # sums are float32: what goes in and out of a layer's seven products and two of the attention is rounded
    close = rounding(torch.bfloat16, LOGIT, 2 * 9 * policy.model.config.num_hidden_layers)
    torch.testing.assert_close(narrow, wide, rtol=0, atol=close)
    assert {one.dtype for one in policy.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("rows", [[0, 2], [1], [3], []])
def test_some_of_the_rows_are_cut_to_their_own_longest(policy, rows):
    batch = sequences(policy)
    cut = batch.rows(torch.tensor(rows, dtype=torch.int64))
    prompts, responses = [PROMPTS[row] for row in rows], [RESPONSES[row] for row in rows]
    # one token per character, and the end
    assert cut.prompt_ids.shape == cut.prompt_mask.shape == (len(rows), max(map(len, prompts), default=0))
    assert cut.response_ids.shape == (len(rows), max((len(text) + 1 for text in responses), default=0))
    assert cut.prompt_ids[cut.prompt_mask].tolist() == batch.prompt_ids[rows][batch.prompt_mask[rows]].tolist()
    assert cut.response_ids[cut.response_mask].tolist() == batch.response_ids[rows][batch.response_mask[rows]].tolist()


def test_positions_count_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]
