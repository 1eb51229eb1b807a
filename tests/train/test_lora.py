"""LoRA: the adapter alone is trained and saved, peft loads it, and the reference policy is the model without it."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rlstab.train.padded_rows import Sequences
from rlstab.train.sampler_weights import Sampler, rounded
from safetensors.torch import load_file, save_file

from rlstab.config import load_run
from rlstab.config.settings import AdapterSettings
from rlstab.errors import CheckpointError, ConfigError, MissingPackage, ModelError
from rlstab.train import loop, lora
from rlstab.train.policy import SHIPPED, Policy, load_policy
from tests.train.runs import go, largest_difference, sampler_gap, small, trained_alike, weights, without_times
from tests.train.test_distributed import command, counted, file_of, ran

if os.environ.get("RLSTAB_REQUIRE_EXTRAS"):  # where they have to be there, a skipped test would hide that they are not
    import peft
else:
    peft = pytest.importorskip("peft", reason='peft is not installed: pip install -e ".[lora]"')

#: peft asks transformers by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

WITH_KL = ["clip_higher", {"name": "kl", "coefficient": 0.1}]
NEW = {"r": 4, "alpha": 8}
FOUR: dict[str, Any] = {"optimisation__rollouts": 4, "optimisation__lr": 1e-2, "tracking__checkpoint_every": 2}


def newest(out: Path) -> Path:
    return sorted((out / "checkpoints").glob("rollout-*"))[-1]


def settings(**given: Any) -> AdapterSettings:
    found = load_run({"objective": "s2t", "model": {"adapter": given}}).model.adapter
    assert found is not None
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rollouts with a KL penalty."""
    out = tmp_path_factory.mktemp("lora") / "run"
    go(small(out, WITH_KL, model__adapter=NEW, **FOUR))
    return out


def some_tokens() -> Sequences:
    ids = torch.arange(24).view(2, 12) % 20
    mask = torch.ones(2, 6, dtype=torch.bool)
    return Sequences(ids[:, :6], mask, ids[:, 6:], mask)


@torch.no_grad()
def logprobs(policy: Policy) -> torch.Tensor:
    found = policy.signals(some_tokens(), torch.arange(12), temperature=1.0, needs={"logprobs"}, options={}).logprobs
    assert found is not None
    return found


# -- what is trained and saved ----------------------------------------------------------------------------------------


def test_a_checkpoint_holds_the_adapter_alone(trained: Path) -> None:
    names = {one.name for one in newest(trained).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "base_model.json"} <= names
    assert not any(name.startswith("model") for name in names)
    saved = weights(trained)
    layers, matrices = 3, 7
    assert len(saved) == 2 * layers * matrices
    assert all(re.search(r"\.lora_[AB]\.weight$", name) for name in saved)
    assert all(float(value.abs().max()) > 0 for name, value in saved.items() if ".lora_B." in name), "it did not move"


def test_peft_loads_it(trained: Path) -> None:
    from transformers import AutoModelForCausalLM

    mine = load_policy("countdown-tiny", adapter=settings(**NEW), saved=newest(trained))
    base = AutoModelForCausalLM.from_pretrained(SHIPPED["countdown-tiny"], dtype=torch.float32)
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        plain = base(ids).logits
        theirs = peft.PeftModel.from_pretrained(base, str(newest(trained)))(ids).logits
        assert torch.equal(mine.model(ids).logits, theirs)
        assert not torch.equal(plain, theirs)
        with mine.without_adapter():
            assert torch.equal(mine.model(ids).logits, plain)
        assert torch.equal(mine.model(ids).logits, theirs)  # it is on again
    assert [one for one in mine.model.parameters() if one.requires_grad], "switched off, it was frozen as well"


def test_it_is_merged_as_the_documents_say(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "how-to" / "lora.md"
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", page.read_text(), re.S) if "merge_and_unload" in one]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(newest(trained), "runs/lora/checkpoints/rollout-000200")
    exec(code, {})  # the code of the page
    mine = load_policy("countdown-tiny", adapter=settings(**NEW), saved=newest(trained))
    torch.testing.assert_close(logprobs(load_policy("./merged")), logprobs(mine), rtol=1e-4, atol=1e-4)


def test_it_continues_bit_for_bit(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = small(out, WITH_KL, model__adapter=NEW, **FOUR)
    go(run)
    shutil.rmtree(newest(out))
    go(run, resume=True)
    assert largest_difference(out, trained) == 0
    assert without_times(out) == without_times(trained)
    with pytest.raises(CheckpointError, match=r"was started with model\.adapter\.r = 4, the configuration says 8"):
        go(small(out, WITH_KL, model__adapter={**NEW, "r": 8}, **FOUR), resume=True)


def test_the_reference_is_the_model_without_the_adapter(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, honest = list[str](), loop.load_policy

    def counting(name: str, **options: Any) -> Policy:
        loaded.append(name)
        return honest(name, **options)

    monkeypatch.setattr(loop, "load_policy", counting)
    go(small(tmp_path / "one", WITH_KL, model__adapter=NEW, optimisation__rollouts=1))
    assert loaded == ["countdown-tiny"]
    second = {"model__adapter": NEW, "model__reference": "countdown-tiny", **FOUR}
    go(small(tmp_path / "two", WITH_KL, **second))
    assert loaded[1:] == ["countdown-tiny"] * 2
    assert without_times(tmp_path / "two") == without_times(trained)
    assert without_times(trained)[-1]["kl/value"] > 1e-5, "the policy did not leave the reference"


def test_responses_are_sampled_with_it(trained: Path) -> None:
    """Of several optimizer steps the gap between sampler and trainer is that of roundings."""
    bound = sampler_gap(torch.float32)
    assert all(record["sampler/gap_live"] < bound for record in without_times(trained))


def test_one_that_is_given_by_its_folder_goes_on(trained: Path, tmp_path: Path) -> None:
    saved = newest(trained)
    go(small(tmp_path / "run", model__adapter=str(saved), optimisation__rollouts=1, optimisation__lr=0.0))
    assert json.loads((newest(tmp_path / "run") / "adapter_config.json").read_text())["r"] == 4
    again = weights(tmp_path / "run")
    assert all(torch.equal(value, again[name]) for name, value in weights(trained).items())


def test_one_of_peft_alone_goes_on(tmp_path: Path) -> None:
    """Half precision, dropout, and nothing that says what it was trained on."""
    theirs = peft.get_peft_model(
        load_policy("countdown-tiny").model,
        peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False),
    ).half()
    theirs.save_pretrained(tmp_path)
    mine = load_policy("countdown-tiny", adapter=settings(path=str(tmp_path)))
    trainable = {name: one for name, one in mine.model.named_parameters() if one.requires_grad}
    assert len(trainable) == 2 * 3
    assert {one.dtype for one in trainable.values()} == {torch.float32}
    assert torch.equal(logprobs(mine), logprobs(mine))


# -- the tied head, bits, activations ---------------------------------------------------------------------------------


def untied(folder: Path) -> str:
    """The shipped model with a head of its own."""
    shutil.copytree(SHIPPED["countdown-tiny"], folder)
    given = load_file(folder / "model.safetensors")
    head = given["model.embed_tokens.weight"].clone()
    save_file({**given, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return str(folder)


def test_a_tied_head_is_left_alone() -> None:
    plain, mine = load_policy("countdown-tiny"), load_policy("countdown-tiny", adapter=settings(**NEW))
    assert mine.model.config.tie_word_embeddings
    assert mine.head is not None
    assert torch.equal(logprobs(mine), logprobs(plain))  # a new one is the identity
    for target in ("lm_head", "embed_tokens"):
        assert refused(targets=[target, "v_proj"]) == (
            "model.adapter does not fit 'countdown-tiny': its vocabulary head is tied to the embeddings, and one "
            "adapter on two places cannot be merged. Leave both out of the targets."
        )


def test_a_head_of_its_own_may_be_a_target(tmp_path: Path) -> None:
    name = untied(tmp_path / "model")
    plain, mine = load_policy(name), load_policy(name, adapter=settings(targets=["lm_head"]))
    assert plain.head is not None
    assert mine.head is None  # more than a product
    found = mine.signals(some_tokens(), torch.arange(12), temperature=1.0, needs={"logprobs"}, options={}).logprobs
    assert found is not None
    found.sum().backward()
    moved = [key for key, one in mine.model.named_parameters() if one.grad is not None and one.grad.abs().max() > 0]
    assert moved == ["lm_head.lora_B.default.weight"]
    torch.testing.assert_close(found.detach(), logprobs(plain), rtol=1e-5, atol=1e-5)
    run = {"model__name": name, "model__adapter": {"targets": "lm_head"}, "optimisation__rollouts": 1}
    go(small(tmp_path / "run", **run, optimisation__lr=1e-2))
    assert len(weights(tmp_path / "run")) == 2
    again = load_policy(name, adapter=settings(), saved=newest(tmp_path / "run"))
    assert not torch.equal(logprobs(again), logprobs(plain))


def test_a_sampler_of_fewer_bits_rounds_the_model_and_keeps_the_adapter(trained: Path) -> None:
    policy = load_policy("countdown-tiny", adapter=settings(**NEW), saved=newest(trained))
    own = dict(Sampler("int4").refreshed(policy).model.named_parameters())
    for name, value in policy.model.named_parameters():
        kept = lora.is_of_adapter(name) or value.ndim < 2 or "embed" in name
        assert torch.equal(own[name], rounded(value, "bf16" if kept else "int4")), name
    assert any(one.requires_grad for one in policy.model.parameters())


def test_activations_that_are_made_again_give_the_same_gradients(trained: Path) -> None:
    found = []
    for again in (False, True):
        policy = load_policy("countdown-tiny", adapter=settings(**NEW), saved=newest(trained))
        if again:
            policy.checkpoint_gradients()
        live = policy.signals(some_tokens(), torch.arange(12), temperature=1.0, needs={"logprobs"}, options={}).logprobs
        assert live is not None
        live.sum().backward()
        found.append({name: one.grad for name, one in policy.model.named_parameters() if one.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == 42
    for name, one in found[0].items():
        torch.testing.assert_close(found[1][name], one)


@pytest.mark.slow
def test_two_processes_train_the_adapter_of_one(tmp_path: Path) -> None:
    # one prompt in each optimizer step, so that one rank is empty; without kl, whose gradient at the reference is a
    # rounding that AdamW would make a whole step of
    changes = {"model__adapter": NEW, "rollout__prompts": 3, "optimisation__mini_batches": 3, "optimisation__lr": 1e-4}
    go(small(tmp_path / "one", **changes))
    ran(command(file_of(small(tmp_path / "two", **changes), tmp_path), 2))
    assert (counted(tmp_path / "one"), counted(tmp_path / "two")) == (1, 2)
    trained_alike(tmp_path / "one", tmp_path / "two")
    assert any(float(value.abs().max()) > 0 for name, value in weights(tmp_path / "two").items() if ".lora_B." in name)


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(name: str = "countdown-tiny", **given: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_policy(name, adapter=settings(**given) if given else None)
    return str(caught.value)


def test_an_adapter_is_no_model(trained: Path, tmp_path: Path) -> None:
    saved, base = str(newest(trained)), str(SHIPPED["countdown-tiny"])
    assert refused(saved) == (
        f"'{saved}' is an adapter of '{base}', not a model: taken for one, none of its weights would be trained. Set "
        f"model.name to '{base}' and model.adapter to '{saved}', or merge the two and give the folder of the result."
    )
    both = tmp_path / "both"  # transformers would load the model with the adapter on it, both frozen
    shutil.copytree(base, both)
    shutil.copytree(saved, both, dirs_exist_ok=True)
    assert "Set model.name to the model that it was trained on" in refused(str(both))


def test_a_model_of_which_nothing_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = loop.load_policy

    def frozen(name: str, **options: Any) -> Policy:
        policy = honest(name, **options)
        policy.model.requires_grad_(False)
        return policy

    monkeypatch.setattr(loop, "load_policy", frozen)
    with pytest.raises(ModelError, match="no weight of 'countdown-tiny' can be trained: none requires a gradient"):
        go(small(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_targets_that_are_not_there() -> None:
    assert refused(targets=["q_proj", "vproj"]) == (
        "model.adapter.targets: 'vproj' is no module of the model. Did you mean 'v_proj'?"
    )
    assert "model.adapter does not fit 'countdown-tiny': " in refused(targets=["norm"])


def test_an_adapter_that_is_not_there(tmp_path: Path) -> None:
    assert refused(path=str(tmp_path)) == (
        f"there is no adapter in '{tmp_path}': it has no adapter_config.json. Give the folder of a LoRA adapter that "
        f"was trained on this model."
    )
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "has no adapter_model.safetensors; pickles are not read" in refused(path=str(tmp_path))


def test_an_adapter_of_another_model(trained: Path, tmp_path: Path) -> None:
    saved = shutil.copytree(newest(trained), tmp_path / "adapter")
    assert f"the adapter '{saved}' was trained on other weights than 'chain-tiny' has now" in refused(
        "chain-tiny", path=str(saved)
    )
    (saved / "base_model.json").unlink()
    name = "model.layers.2.mlp.up_proj.lora_B.weight"
    given = {key.removeprefix("base_model.model."): value for key, value in load_file(saved / lora.WEIGHTS).items()}
    save_file({**given, name: given[name][:5].contiguous()}, saved / lora.WEIGHTS)
    assert f"it has another shape of {name}" in refused(path=str(saved))
    save_file({key: value for key, value in given.items() if key != name}, saved / lora.WEIGHTS)
    assert f"it lacks {name}" in refused(path=str(saved))
    save_file({**given, "more": torch.zeros(1)}, saved / lora.WEIGHTS)
    assert "it has, and the model does not, more" in refused(path=str(saved))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bias": "all"}, "changes biases"),
        ({"modules_to_save": ["lm_head"]}, r"has whole modules beside its matrices (lm_head)"),
        ({"trainable_token_indices": [1]}, "trains embeddings of some tokens"),
        ({"peft_type": "IA3"}, "is of the kind IA3, and LoRA is what can be trained"),
        ({"peft_type": "NONE_SUCH"}, "cannot be read: "),
    ],
)
def test_a_kind_of_adapter_that_is_not_trained(
    changes: dict[str, Any], text: str, trained: Path, tmp_path: Path
) -> None:
    saved = shutil.copytree(newest(trained), tmp_path / "adapter")
    config = json.loads((saved / "adapter_config.json").read_text())
    if changes.get("peft_type", "LORA") != "LORA":
        config = {"base_model_name_or_path": None}
    (saved / "adapter_config.json").write_text(json.dumps(config | changes))
    assert text in refused(path=str(saved))


def test_peft_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlstab.extras.find_spec", lambda name: None)
    with pytest.raises(MissingPackage) as caught:
        load_policy("countdown-tiny", adapter=settings(**NEW))
    assert str(caught.value) == (
        "model.adapter needs the extra `lora`: peft is not installed. In the folder of your clone of rlstab, run: "
        "pip install -e '.[lora]'"
    )


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        ({"dropout": 0.1}, "model.adapter.dropout: a policy is trained without dropout"),
        ({"rank": 4}, "model.adapter.rank: unknown key 'rank'."),
        ({"r": 0}, "model.adapter.r: expected a number of at least 1, not 0."),
        ({"targets": []}, "model.adapter.targets: no module is named. Write `all-linear` for all of them."),
        ({"path": "x", "r": 4}, "model.adapter.r: the adapter that is continued has its own r."),
        (5, "model.adapter: expected a mapping, not 5."),
    ],
)
def test_settings_that_do_not_fit(adapter: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run({"objective": "s2t", "model": {"adapter": adapter}})
    assert str(caught.value).startswith(text)


def test_settings_are_filled_in() -> None:
    def read(adapter: Any) -> dict[str, Any]:
        found = load_run({"objective": "s2t", "model": {"adapter": adapter}}).model.adapter
        assert found is not None
        return found.model_dump(mode="json")

    assert read({}) == {"path": None, "r": 16, "alpha": 32, "targets": ["all-linear"]}
    assert read(read({})) == read({})
    assert read("a/folder") == {"path": "a/folder", "r": None, "alpha": None, "targets": None}
    assert read(read("a/folder")) == read("a/folder")
