"""What other trainers hand to a loss of somebody else, and what the adapters that ship make of it: data.

The adapters check themselves against it when a trainer is made; ``rlstab check --host``, ``rlstab explain`` and
``rlstab doctor`` read the same facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlstab.core.batch import SIGNALS
from rlstab.core.compose import Composition
from rlstab.core.objective import TokenObjective
from rlstab.core.observe import Observe
from rlstab.core.walk import walk
from rlstab.errors import UnknownName, did_you_mean
from rlstab.explain.data_level import refusal
from rlstab.signals import SIGNAL_NAMES, TRAINER_SIGNALS

_LOGITS = frozenset({"entropies", "max_logprobs", "log_kept_mass", "sum_p_sq"})
_LIVE = frozenset({"entropies", "log_kept_mass"})


@dataclass(frozen=True)
class Host:
    """One hook of one trainer.

    Attributes:
        name: of the trainer.
        hook: where a loss is put.
        gives: signals of the evidence beyond log-probs, their old values and advantages.
        live: outputs of the live policy that can be differentiated beyond the log-probs.
        step: a loss can see the whole optimizer step before its first backward pass, for thresholds and for the count
            of the tokens that are kept.
        read: False where the hook was run, True where its source was only read.
        key: by which ``rlstab check --host`` knows it; empty where no adapter ships.
        adapter: what a user imports.
        package: what the adapter needs, as pip names it.
        oldest: the first release of it that the adapter takes.
        later: it takes later ones too.
        how: signals that it gives only where something is set, with what to set.
        otherwise: what to do about a signal that no setting gives, other than to remove the method; ``{name}`` is it.
        spared: where the evidence of a step costs no forward though a method reads it.
        data_level: its own loss stays, and an objective reaches it through a mask and advantages.
        tried: what was run of an adapter that was never run in its host; empty where it was.
        install: how to get the package, where it is no extra of rlstab.
    """

    name: str
    hook: str
    gives: frozenset[str]
    live: frozenset[str] = frozenset()
    step: bool = False
    read: bool = True
    key: str = ""
    adapter: str = ""
    package: str = ""
    oldest: str = ""
    later: bool = True
    how: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = "use a host that provides it"
    spared: str = ""
    data_level: bool = False
    tried: str = ""
    install: str = ""

    @property
    def titled(self) -> str:
        """Its name, and the releases that the adapter takes."""
        if not self.oldest:
            return self.name
        return f"{self.name} {self.oldest} or later" if self.later else f"{self.name} {self.oldest}"

    def cure(self, name: str) -> str:
        """What to do about a signal that it lacks, other than to remove the method."""
        return self.how.get(name, self.otherwise.format(name=name))

    def lacks(self, objective: TokenObjective) -> list[str]:
        """What an objective needs and this hook does not hand over; empty where nothing is missing."""
        found = [f"`{name}`" for name in sorted(objective.needs - self.gives)]
        found += [f"live `{name}`" for name in sorted(objective.live_needs - self.live)]
        if not self.step and any(measures(leaf.method) or "keep" in leaf.method.writes for leaf in walk(objective)):
            found.append("a look at the whole optimizer step")
        if self.data_level:
            asks = {what: leaf.name for leaf in walk(objective) if (what := refusal(leaf.method)) is not None}
            found += [f"a place for what `{name}` asks for: {what}" for what, name in asks.items()]
        return found


def measures(method: TokenObjective) -> bool:
    """It decides by statistics of the whole optimizer step."""
    if isinstance(method, Observe):
        return any(measures(leaf.method) for leaf in walk(method, observed=True))
    return type(method).measure is not TokenObjective.measure


#: As of mid-2026; TRL 1.16.0 and verl 0.9.1 where run. A response is truncated where its last token, which those two
#: hand over, is no EOS.
HOSTS: tuple[Host, ...] = (
    Host(
        "TRL",
        "`rlstab.adapters.trl.RLStabGRPOTrainer`",
        SIGNAL_NAMES - {"logprobs"} | {"ref_logprobs", "rollout_logprobs", "truncated"},
        live=_LIVE,
        step=True,
        read=False,
        key="trl",
        adapter="rlstab.adapters.trl",
        package="trl",
        oldest="1.16",
        how={
            "ref_logprobs": "set GRPOConfig.beta above 0, which loads the reference model",
            "rollout_logprobs": "generate with vLLM (use_vllm=True), or with a rollout_func that returns logprobs",
            **dict.fromkeys(("max_logprobs", "log_kept_mass", "sum_p_sq"), "write head='rlstab'"),
        },
        otherwise="give the trainer signals={{'{name}': function}}, (B, T) values from its batch",
        spared="where an optimizer step is one micro-batch",
    ),
    Host(
        "the data level",
        "`rlstab.adapters.data.DataLevel`",
        frozenset(SIGNALS),
        step=True,
        read=False,
        key="data",
        adapter="rlstab.adapters.data",
        data_level=True,
    ),
    Host("verl", "`register_policy_loss`", frozenset(), read=False),
    Host(
        "verl",
        "`policy_loss.loss_mode=rlstab:FILE`",
        SIGNAL_NAMES - {"logprobs"} | {"ref_logprobs", "rollout_logprobs", "truncated"},
        live=_LIVE,
        step=True,
        read=False,
        key="verl",
        adapter="rlstab.adapters.verl",
        package="verl",
        oldest="0.9.1",
        later=False,
        how={
            "ref_logprobs": "set actor_rollout_ref.actor.use_kl_loss=true, which loads the reference model",
            "rollout_logprobs": "set actor_rollout_ref.rollout.calculate_log_probs=true",
            **dict.fromkeys(
                ("max_logprobs", "log_kept_mass", "sum_p_sq"),
                "leave actor_rollout_ref.model.use_fused_kernels at false: fused kernels form no logits",
            ),
        },
    ),
    Host("slime, miles", "`--custom-loss-function-path`", _LOGITS | {"ref_logprobs", "rollout_logprobs"}, live=_LIVE),
    Host("prime-rl", "`[trainer.loss] type = custom`", frozenset({"ref_logprobs", "rollout_logprobs"})),
    Host("SkyRL", "`PolicyLossRegistry`", frozenset({"rollout_logprobs"})),
    Host("NeMo-RL", "`loss_fn` of `grpo_train`", _LOGITS | {"ref_logprobs", "rollout_logprobs"}, live=_LIVE),
    Host("AReaL", "`loss_fn` of `train_batch`", frozenset({"entropies"})),
    Host("ROLL", "`worker_cls`, `loss_func`", _LOGITS | {"ref_logprobs"}, live=_LIVE),
    Host("XTuner", "`policy_loss_cfg.loss_type`", frozenset()),
)


def adapted(key: str) -> Host:
    """The host that an adapter ships for.

    Raises:
        UnknownName: there is none of this name.
    """
    ours = {one.key: one for one in HOSTS if one.key}
    if key not in ours:
        raise UnknownName(f"no adapter is called '{key}'. {did_you_mean(key, ours)}")
    return ours[key]


def hosts(objective: Composition) -> list[str]:
    """Our trainer, a loop of one's own, the adapters, and what the hooks of others would hand over."""
    rows = [
        f"| {one.name} | {one.hook} | {', '.join(one.lacks(objective)) or 'nothing'} | "
        f"{'reading it' if one.read else 'running it'} |"
        for one in HOSTS
        if not one.key
    ]
    needs = sorted(f"`{name}`" for name in objective.needs) + sorted(f"live `{name}`" for name in objective.live_needs)
    listed = ", ".join(["log-probs, old log-probs, advantages", *needs])
    foreign = [name for name in sorted(objective.needs) if name not in TRAINER_SIGNALS]
    own = f"no: it does not provide {', '.join(f'`{name}`' for name in foreign)}" if foreign else "yes"
    return [
        f"- rlstab's own trainer (`rlstab train`): {own}.",
        f"- A loop of yours: yes, if it holds {listed}; it calls the objective, or `make_plan` for a step in parts.",
        *(_through(one, objective) for one in HOSTS if one.key),
        "- Other trainers: no adapter ships yet. What the hook of each, as of mid-2026, does not hand over:",
        "",
        "| trainer | hook | lacks, for this objective | known by |",
        "|---|---|---|---|",
        *rows,
    ]


def _through(host: Host, objective: Composition) -> str:
    lacks = host.lacks(objective)
    said = f"no: it lacks {', '.join(lacks)}" if lacks else "yes"
    beside = {"ref_logprobs", "rollout_logprobs"} & objective.needs & host.how.keys()
    also = "".join(f"; for `{name}`, {host.how[name]}" for name in sorted(beside))
    tried = f" ({host.tried})" if host.tried else ""
    return f"- {host.titled}, through `{host.adapter}`{tried}: {said}{also}."
