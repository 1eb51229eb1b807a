"""The page on verl and its example, as they are printed; what they launch is composed by verl itself."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.adapters.cpu_verl", reason="verl is not installed: nox -s verl")

from tests.adapters.jobs import ROOT, launched, shell
from tests.adapters.verl_jobs import batch_of, composed, rollout, worker_of

#: verl and what it imports warn of their own future, and of engines that are not installed.
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = (ROOT / "docs" / "hosts" / "verl.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "verl_grpo.sh"


def trainable(config: Any) -> None:
    """verl's own classes take the configuration, and the adapter has nothing to refuse."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from rlstab import compose, load_objective
    from rlstab.adapters.host_objective import settings_of_verl
    from rlstab.adapters.setting_conflicts import check_verl_settings
    from rlstab.adapters.verl.loss_mode import objective_file
    from rlstab.adapters.verl.worker import require_from

    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    host = config.actor_rollout_ref
    omega_conf_to_dataclass(host.actor)
    objective = compose(load_objective(str(objective_file(host))))
    check_verl_settings(settings_of_verl(host), objective)
    require_from(host, objective)


def test_the_lines_of_the_page_run(tmp_path: Path) -> None:
    """All but the installation; verl's launch composes its configuration and stops there (Hydra's ``--cfg job``).

    An actor with a tiny model trains on a CPU by verl's other settings as the page has them.
    """
    from omegaconf import OmegaConf
    from verl.utils import tensordict_utils as tu

    (yaml,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "objective.yaml").write_text(yaml)
    first, launch = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    lines = [line.partition("#")[0].strip() for line in first.splitlines()]
    assert [line.split()[0] for line in lines] == ["pip", "rlstab", "rlstab"]
    doctor, check = (" ".join(shell(line, tmp_path).split()) for line in lines[1:])
    assert "verl 0.9.1: rlstab.adapters.verl is live" in doctor
    assert "verl 0.9.1, through rlstab.adapters.verl" in check
    trainable(OmegaConf.create(shell(launch.rstrip() + " --cfg job", tmp_path)))

    given = launched(launch, tmp_path)
    ours = dict(line.removeprefix("actor_rollout_ref.").split("=", 1) for line in given if line.startswith("actor_r"))
    tiny = ("model.path", "actor.ppo_m", "rollout.n=", "rollout.log_prob", "rollout.name")
    kept = {name: value for name, value in ours.items() if not name.startswith(tiny)}
    assert set(kept) == {"actor.strategy", "actor.policy_loss.loss_mode", "rollout.n"}
    worker = worker_of(tmp_path, **{**kept, "rollout.n": 4})
    assert list(worker.actor.objective.keyed) == ["clip_higher", "s2t", "stare"]
    metrics = tu.get(worker.update_actor(batch_of(rollout(0), 0, 1)), "metrics")
    assert "actor/rlstab/s2t/dropped" in metrics


def test_the_example_is_a_launch_that_verl_takes(tmp_path: Path) -> None:
    overrides = launched(f"{EXAMPLE} trainer.total_epochs=1", tmp_path)
    assert overrides[-1] == "trainer.total_epochs=1"
    config = composed(overrides)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == f"rlstab:{ROOT}/examples/objective.yaml"
    trainable(config)


def test_a_launch_finds_what_it_imports() -> None:
    """What both of verl's task runners import, with the extra and the pins of this repository."""
    import transfer_queue  # noqa: F401  # importing it is the test
    import verl.trainer.main_ppo
    import verl.trainer.main_ppo_v0  # noqa: F401  # likewise
    from verl.trainer.ppo.v1 import get_trainer_cls

    for mode in ("sync", "colocate_async", "separate_async"):
        assert get_trainer_cls(mode).__module__.startswith("verl.trainer.ppo.v1")
