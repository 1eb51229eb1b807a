"""axolotl's own command on the example: by its trainer, by settings alone, and by an objective inline and as a file."""

import json
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytest.importorskip("axolotl", reason="axolotl is not installed: nox -s axolotl")

from rlstab.adapters.releases import check_release
from rlstab.errors import ConfigError
from tests.adapters.jobs import ROOT, shell

EXAMPLE = ROOT / "examples" / "axolotl" / "chain.yaml"
PAGE = (ROOT / "docs" / "hosts" / "axolotl.md").read_text(encoding="utf-8")
#: The page's, with this checkout on the path too, where rlstab is not installed.
LINE = next(line for line in PAGE.splitlines() if " axolotl train " in line).replace("=", f"={ROOT}:", 1)
#: axolotl waits for its telemetry without the last.
ON_CPU = {"ACCELERATE_USE_CPU": "true", "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.2}
MASK = {"name": "random_mask", "share": 0.3, "sign": "all"}
#: Reads the entropies of the whole optimizer step, and drops about half of its tokens.
FORKS = {"name": "top_entropy", "share": 0.5}

#: axolotl warns of its own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two optimizer steps of two micro-batches by each file: weights, and the last line of the log."""
    folder = tmp_path_factory.mktemp("axolotl")
    (folder / "rlstab").symlink_to(ROOT / "rlstab")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "objective.yaml").write_text(yaml.safe_dump({"objective": [CLIP, MASK]}))
    shell("python examples/axolotl/axolotl_chain.py", folder)
    given = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    common = given | {"max_steps": 2, "micro_batch_size": 8, "save_steps": 2, "seed": 3}
    named: dict[str, Any] = {
        "theirs": {name: value for name, value in common.items() if name not in ("plugins", "rlstab")},
        "settings": {name: value for name, value in common.items() if name != "rlstab"},
        "inline": common | {"rlstab": {"base": "config", "objective": [MASK]}},
        "file": common | {"rlstab": {"objective": "objective.yaml"}},
        "forks": common | {"rlstab": {"base": "config", "objective": [FORKS]}},
    }
    told: dict[str, Any] = {}
    for name, config in named.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config | {"output_dir": name}))
        shell(LINE.replace("examples/axolotl/chain.yaml", f"{name}.yaml"), folder, **ON_CPU)
        log = json.loads((folder / name / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
        told[name] = {"log": [line for line in log if "grad_norm" in line], "folder": folder / name}
        told[name]["weights"] = load_file(folder / name / "model.safetensors")
    return told


def apart(first: Any, second: Any) -> float:
    return max(float((values - second["weights"][name]).abs().max()) for name, values in first["weights"].items())


def test_without_an_objective_it_trains_as_axolotl_does(runs: dict[str, Any]) -> None:
    start = {"weights": load_file(ROOT / "rlstab" / "data" / "chain-tiny" / "model.safetensors")}
    assert apart(runs["theirs"], start) > 1e-4
    assert apart(runs["theirs"], runs["settings"]) == 0.0
    for mine, other in zip(runs["settings"]["log"], runs["theirs"]["log"], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)  # another order of additions
        assert mine["grad_norm"] == other["grad_norm"]
    assert "rlstab/steps/refused" in runs["settings"]["log"][-1]
    assert "rlstab/steps/refused" not in runs["theirs"]["log"][-1]


def test_an_objective_acts_inline_and_as_a_file(runs: dict[str, Any]) -> None:
    for name in ("inline", "file"):
        assert all(0.2 < line["rlstab/random_mask/dropped"] < 0.4 for line in runs[name]["log"])
        assert len(runs[name]["log"]) == 2
        assert (runs[name]["folder"] / "checkpoint-2" / "rlstab.json").exists()
    assert apart(runs["inline"], runs["file"]) == 0.0
    assert apart(runs["inline"], runs["theirs"]) > 1e-5


def test_a_method_that_drops_tokens_counts_them(runs: dict[str, Any]) -> None:
    for line in runs["forks"]["log"]:
        assert line["rlstab/tokens/kept"] == pytest.approx(line["rlstab/top_entropy/share"])
        assert 0.45 < line["rlstab/tokens/kept"] < 0.7
        assert line["rlstab/tokens/live"] <= line["rlstab/tokens/kept"]
    assert apart(runs["forks"], runs["theirs"]) > 1e-5
    first, plain = runs["forks"]["log"][0], runs["theirs"]["log"][0]
    assert first["grad_norm"] != pytest.approx(plain["grad_norm"], rel=0.01)


@pytest.mark.parametrize(
    ("objective", "words"),
    [([{"name": "clip_highr"}], "Did you mean 'clip_higher'"), ("objektive.yaml", "objektive.yaml")],
)
def test_a_bad_objective_is_refused_before_anything_is_loaded(objective: Any, words: str) -> None:
    from rlstab.adapters.axolotl import RLStabPlugin

    with pytest.raises(ConfigError, match=words):
        RLStabPlugin().register({"rl": "grpo", "rlstab": {"objective": objective}})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rl": "dpo"}, r"Write rl: grpo\."),
        ({"rl": "grpo", "trl": {"async_prefetch": True}}, r"Write trl\.async_prefetch: false\."),
        ({"rl": "grpo", "context_parallel_size": 2}, r"Write context_parallel_size: 1\."),
        ({"rl": "grpo", "trainer_cls": "mine.Trainer"}, r"trainer_cls: rlstab\.adapters\.axolotl\."),
    ],
)
def test_other_trainers_of_axolotl_are_refused(given: dict[str, Any], words: str) -> None:
    from rlstab.adapters.axolotl import RLStabPlugin

    with pytest.raises(ConfigError, match=words):
        RLStabPlugin().register(given)


def test_the_trainer_without_the_plugin_is_refused() -> None:
    from rlstab.adapters.axolotl import RLStabAxolotlTrainer

    with pytest.raises(ConfigError, match="axolotl ignores the key rlstab"):
        RLStabAxolotlTrainer(torch.nn.Identity())


def test_axolotl_is_what_the_adapter_knows(recwarn: pytest.WarningsRecorder) -> None:
    check_release("axolotl")
    assert not [warning for warning in recwarn if "adapter" in str(warning.message)]
