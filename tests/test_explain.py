"""``rlstab explain``: its words tell apart what acts differently, and its sections say what the code does."""

import re
from pathlib import Path
from typing import Any

import pytest

import rlstab
from rlstab import STARE, ClipHigher, KLPenalty, S2TMask, TokenMean, TokenObjective, compose
from rlstab.cli import main
from rlstab.config import load_run, objective_hash, run_hash
from rlstab.core.metadata import card
from rlstab.core.method_settings import settings_of
from rlstab.core.terms import WRITABLE
from rlstab.errors import MissingSignal
from rlstab.explain import stages
from rlstab.explain.costs import costs
from rlstab.explain.explanation import STORY, page, story
from rlstab.explain.notes import crossed, idle, idle_in_run, notes, pairs, unsafe
from rlstab.presets import PRESETS
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.rloo import RLOO
from rlstab.stages.stage import RewardShaper
from rlstab.train import train
from rlstab.zoo import METHODS
from tests.examples import EXAMPLES, STAGE_EXAMPLES
from tests.zoo.watch import SHIPPED


def test_the_words_of_a_method_name_every_field_and_every_setting() -> None:
    for cls in SHIPPED:
        for method in EXAMPLES[cls.name]:
            words = method.in_words()
            assert words.keys() == (method.writes or {"report"}), method
            assert "``" not in "".join(words.values())
        named = set(re.findall(r"``(\w+)``", " ".join(card(cls).written.values())))
        # the denominator of a mask decides which field it fills, and what only reports has no words
        unnamed = {setting.name for setting in settings_of(cls)} - named - {"denominator"}
        assert not unnamed or cls.name == "mismatch", cls
    assert "below 0.01 and its entropy is below the 0.75-quantile" in S2TMask(max_prob=0.01).in_words()["keep"]
    off = rlstab.OPD(alone=True).in_words()["bonus"], ClipHigher().in_words()["bounds"]
    assert [text.split(": ")[-1].split(")")[0] for text in off] == ["yes.", "none"]


def heads(lines: list[str]) -> list[tuple[str, str]]:
    """Of each line the bold head and the first name in backticks, if it follows."""
    return [(line.split("**")[1].rstrip("."), line.split("`")[1] if ".** `" in line else "") for line in lines]


def test_the_story_is_told_in_the_order_of_the_loss() -> None:

    nested = rlstab.within(S2TMask(), rlstab.TopEntropyMask())
    objective = compose(KLPenalty(), STARE(), S2TMask(), ClipHigher(), nested)
    assert heads(story(objective, None, Pipeline.of(RLOO()))) == [
        ("Advantage", "rloo"), ("Drop", "s2t_1"), ("Drop", "s2t_2"), ("Drop", "top_entropy"),
        ("Trust region", "clip_higher"), ("Weight", "stare"), ("Average", "token_mean"), ("Penalty", "kl"),
    ]  # fmt: skip
    assert any("top_entropy`, among the tokens that `s2t` keeps" in line for line in story(objective, None, None))
    assert STORY.keys() == {*WRITABLE, "report"}
    # that there is no trust region is said where nothing replaces it
    for names, told in (([], True), (["fipo"], True), (["gspo"], True), (["gspo", "sapo"], False)):
        methods = [METHODS.get(name)() for name in names]
        assert ("Trust region" in dict(heads(story(compose(*methods), None, None)))) == told


def run_of(objective: Any, **parts: Any) -> Any:
    return load_run({"objective": objective, **parts})


def test_what_is_idle_in_a_run() -> None:
    for objective, parts, beginning in (
        ({"name": "lp_reg", "ratio_cap": 10.0}, {}, "the trust region of lp_reg cannot act"),
        ("s2t", {"optimisation": {"refresh": "step"}}, "optimisation.refresh"),
        ("s2t", {"optimisation": {"refresh": "step", "mini_batches": 2}}, None),
        ("s2t", {"stages": [{"name": "grpo", "ddof": 0, "std": False}]}, "grpo.ddof"),
    ):
        run = run_of([objective], **parts)
        lines = idle_in_run(run.composition, run)
        assert [line.startswith(str(beginning)) for line in lines] == [True] * (beginning is not None)


OVERLONG, PATTERN = {"name": "overlong", "buffer": 4}, {"name": "jsonl", "path": "x.jsonl", "answer_pattern": "a(b)"}


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"stages": [OVERLONG, "dynamic_sampling"]}, "dynamic_sampling.rewards: after overlong, .*`rewards: raw`"),
        ({"stages": [OVERLONG, {"name": "laconic", "budget": 9}, "dynamic_sampling"]}, ".*after overlong and laconic"),
        ({"stages": [OVERLONG, {"name": "dynamic_sampling", "rewards": "raw"}]}, None),
        ({"stages": ["dynamic_sampling"]}, None),
        ({"stages": ["dynamic_sampling", "deep_grpo"]}, "deep_grpo: .*List it first"),
        ({"stages": ["deep_grpo", "dynamic_sampling"]}, None),
        ({"model": {"reference": "chain-tiny"}}, "model.reference: no method reads ref_logprobs"),
        ({"model": {"reference": "chain-tiny"}, "objective": ["kl"]}, None),
        ({"model": {"teacher": "chain-tiny"}}, "model.teacher: no method reads teacher_logprobs"),
        ({"model": {"teacher_prompt": "a hint"}}, "model.teacher_prompt: no method reads teacher_logprobs"),
        ({"model": {"teacher_prompt": "a hint"}, "objective": ["opd"]}, None),
        ({"evaluation": {"sampler": True}}, "evaluation.sampler: the policy itself samples"),
        ({"evaluation": {"sampler": True}, "rollout": {"precision": "int8"}}, None),
        ({"task": PATTERN, "reward": "own.py:f"}, "task.answer_pattern: only the task's scorer reads it"),
        ({"task": {**PATTERN, "scorer": "math_verify", "answer_pattern": None}, "reward": "own.py:f"}, "task.scorer:"),
        ({"task": PATTERN, "reward": ["own.py:f", "task"]}, None),
        ({"task": PATTERN}, None),
    ],
)
def test_an_option_that_another_one_crosses_is_told(parts: dict[str, Any], told: str | None) -> None:
    run = load_run({"objective": ["s2t"], **parts})
    lines = crossed(run)
    assert len(lines) == (told is not None), lines
    assert all(re.match(str(told), line) for line in lines)
    assert set(lines) <= {*notes(run.composition, run)}


def test_what_is_unsafe_in_a_run() -> None:
    for objective, optimisation, count in (
        (["s2t"], {}, 0),
        (["s2t"], {"mini_batches": 4}, 1),
        (["s2t", "clip_higher"], {"mini_batches": 4}, 0),
        (["s2t"], {"scope": "microbatch"}, 1),
    ):
        run = run_of(objective, optimisation=optimisation)
        assert len(unsafe(run.composition, run)) == count
        assert sum("**Warning:**" in line for line in idle(run.composition, run)) == count


def test_settings_at_which_a_method_does_nothing_and_what_acts_only_later() -> None:
    (kl, stare) = idle(compose(KLPenalty(coefficient=0.0), STARE(variant="C2", boost=1.0, damp=1.0), S2TMask()), None)
    assert kl.startswith("- KLPenalty(")
    assert stare.startswith("- STARE(")
    (clip,) = idle(compose(ClipHigher(), S2TMask()), None)
    assert clip.endswith("`clip_higher`.")


def test_what_is_expected_and_missing_or_excluded_is_told() -> None:
    assert "expects `sequence_mean`" in pairs(compose(rlstab.GSPO(), TokenMean()))[0]
    assert not any("expects" in line for line in pairs(compose(rlstab.GSPO(), rlstab.SequenceMean())))
    run = run_of(["clip_higher"], stages=["deep_grpo", "max_rl"])
    told = pairs(run.composition, run.pipeline)
    assert any("expects `stream_weight`" in line for line in told)
    assert any(line.startswith("- **Excluded:** `max_rl`") for line in told)


def test_what_a_run_costs() -> None:
    run = run_of(["s2t", "kl"], optimisation={"epochs": 2, "mini_batches": 2})
    text = "\n".join(costs(run.composition, run))
    for told in ("4 optimizer steps", "one per rollout of the reference model", "`entropies`, for `s2t`"):
        assert told in text


def test_where_it_can_run() -> None:
    def where(objective: TokenObjective) -> str:
        return page("x", compose(objective), None).partition("## Where it can run")[2]

    assert "- Not prime-rl" in where(S2TMask())  # which gives a loss no entropies
    assert where(S2TMask()).count("- Not ") == 1
    assert where(KLPenalty()).count("- Not ") == 1  # the data level has no place for a penalty
    assert where(rlstab.BlockMean()).count("- Not ") == 6  # the task alone knows blocks


def test_a_rollout_is_told_in_its_order() -> None:
    several = ["dynamic_sampling", {"name": "opob"}, {"name": "overlong", "buffer": 4}, "deep_grpo"]
    run = run_of(["clip_higher"], stages=[*several, {"name": "goldilocks", "pool": 64}])
    assert heads(stages.rollout(run.pipeline, run)) == [
        ("Prompts", "goldilocks"), ("Responses", ""), ("Rewards", "overlong"), ("Rollout", "dynamic_sampling"),
        ("Rollout", "deep_grpo"), ("Advantages", "opob"),
    ]  # fmt: skip


NEEDS = frozenset({"entropies", "squared_gradient", "my_signal", "prompt_features", "reward/task", "reward/tusk"})
READS = type("Reads", (RewardShaper,), {"name": "reads", "needs": NEEDS, "shape": lambda self, *_: None})()


def test_what_the_trainer_lacks_for_a_stage_is_told_and_refused(tmp_path: Path) -> None:
    reward = [{"function": "task", "weight": weight, "name": name} for weight, name in ((1.0, "a"), (2.0, "task"))]
    run = run_of(["clip_higher"], reward=reward, tracking={"out": str(tmp_path / "run")})
    for several in STAGE_EXAMPLES.values():
        run._pipeline = Pipeline.of(several[0])
        assert stages.lacking(run) == [], several[0]
    run._pipeline = Pipeline.of(READS)
    told = stages.lacking(run)
    assert [re.findall(r"'reads' reads '(.*?)'", text) for text in told] == [
        ["my_signal"], ["prompt_features"], ["reward/tusk"], ["squared_gradient"]
    ]  # fmt: skip
    assert "Did you mean 'reward/task'" in told[2]
    assert "only for one of the kind advantages" in told[3]
    with pytest.raises(MissingSignal, match="my_signal"):
        train(run)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The Markdown of ``rlstab explain`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: (main(["explain", *arguments, "--markdown"]), capsys.readouterr().out)[1]


def test_names_presets_and_files_are_explained(explained: Any) -> None:
    Path("f.yaml").write_text("objective: [s2t, {preset: dapo}]\nseed: 1\n")
    assert explained("s2t,dapo") == page("s2t,dapo", compose(S2TMask(), PRESETS["dapo"].objective), None)
    run = load_run("f.yaml", {"optimisation.epochs": 3})
    filed = explained("f.yaml", "--set", "optimisation.epochs=3")
    assert f"`{objective_hash(run.composition)}`, run `{run_hash(run)}`" in filed
    shared = explained("stare")  # a method and a preset have this name
    assert objective_hash(compose(STARE())) in shared
    assert "`rlstab explain --preset stare`" in shared
    preset = explained("--preset", "stare")
    assert objective_hash(PRESETS["stare"].objective) in preset
    assert ", run `" not in shared + preset
    for source in (["stare"], ["--preset", "stare"]):
        assert ", run `" in explained(*source, "--set", "optimisation.epochs=2")
    Path("s2t").write_text("kl")
    assert objective_hash(compose(KLPenalty())) in explained("s2t")  # a file goes before a name


def test_it_is_printed_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--preset", "recommended"]) == 0
    assert "`" not in capsys.readouterr().out
