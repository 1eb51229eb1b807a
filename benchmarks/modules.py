"""What the methods cost on top of the head: one optimizer step of many tokens, everything after the signals.

    python -m benchmarks modules --tokens 64x4096 --modules 0,1,5,10,all --json

`plain` is a hand-written GRPO loss: clipped ratio times advantage, masked mean, backward to the log-probs. The other
cases are the library as a trainer calls it: `pack` takes the padding out of the evidence, `plan` measures, settles and
decides (thresholds are exact order statistics), `loss` is the loss of the whole step and its backward; `stage` is plan
and loss. Methods are taken in the order that is printed; one that conflicts with those before it is left out. The head
is timed in the same run on fewer tokens, forward and backward with all rows live, and counted by the token.
"""

import warnings
from collections.abc import Callable

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.heads import HEADS, Problem, inputs, step, weights_of
from benchmarks.protocol import SEED, Case, Run, interleave, listed, measured, parser
from rlstab import Composition, PolicyOutputs, TokenBatch, compose, make_plan
from rlstab.core.batch import SIGNALS
from rlstab.core.objective import TokenObjective
from rlstab.core.plan import Plan
from rlstab.errors import Conflict, FitWarning
from rlstab.zoo.lp_reg import LpReg
from tests.examples import EXAMPLES

#: First what every recipe has; then those that need a statistic of the whole step; then the rest, by name.
FIRST = ("clip_higher", "token_mean", "top_entropy", "s2t", "stare", "lp_reg", "kl", "entropy_bonus")
#: Of a method with several settings, those that leave room for others: Lp-Reg without its own trust region.
SETTINGS: dict[str, TokenObjective] = {"lp_reg": LpReg(ratio_cap=None)}
OUTPUTS = ("logprobs", "entropies", "log_kept_mass", "sum_p_sq", "teacher_divergence")


def stack() -> list[TokenObjective]:
    """Methods of the zoo that compose, in order."""
    methods: list[TokenObjective] = []
    for name in [*FIRST, *sorted(set(EXAMPLES) - set(FIRST))]:
        method = SETTINGS.get(name, EXAMPLES[name][0])
        try:
            compose(*methods, method)
        except Conflict:
            continue
        methods.append(method)
    return methods


def evidence(rows: int, length: int) -> dict[str, Tensor]:
    """Padded signals of one step, all of its tokens real: consistent with one another, of the usual size."""
    draw = torch.Generator().manual_seed(SEED)
    top = -torch.rand(rows, length, generator=draw).pow(3) * 2 - 1e-3
    live = torch.where(torch.rand(rows, length, generator=draw) < 0.7, top, top - torch.rand(rows, length).mul(9))
    return {
        "logprobs": live,
        "old_logprobs": (live + 0.1 * torch.randn(rows, length, generator=draw).clamp(-2, 2)).clamp(max=0),
        "entropies": -top * 1.5 + 0.1 * torch.rand(rows, length, generator=draw),
        "ref_logprobs": (live + 0.1 * torch.randn(rows, length, generator=draw)).clamp(max=0),
        "rollout_logprobs": (live + 0.01 * torch.randn(rows, length, generator=draw)).clamp(max=0),
        "max_logprobs": top,
        "log_kept_mass": top * 0.1,
        "sum_p_sq": top.exp().square(),
        "truncated": (torch.rand(rows, 1, generator=draw) < 0.1).expand(rows, length),
        "branch": (torch.rand(rows, 1, generator=draw) < 0.5).expand(rows, length),
        "lag": torch.arange(rows).remainder(4).unsqueeze(1).expand(rows, length),
        "teacher_logprobs": (live + 0.2 * torch.randn(rows, length, generator=draw)).clamp(max=0),
        "block_ids": (torch.arange(length) * 3 // length).expand(rows, length),
        "teacher_divergence": torch.rand(rows, length, generator=draw),
        "turn": (torch.arange(length) * 2 // length).expand(rows, length),
        "turn_reward": torch.randn(rows, 2, generator=draw)[:, torch.arange(length) * 2 // length],
    }


class Step:
    """One optimizer step as a trainer sees it: padded evidence, advantages by response, live outputs with gradient."""

    def __init__(self, rows: int, length: int) -> None:
        self.padded = evidence(rows, length)
        self.mask = torch.ones(rows, length, dtype=torch.bool)
        self.advantages = torch.randn(rows, generator=torch.Generator().manual_seed(SEED + 1))
        self.live = {name: self.padded[name].reshape(-1).clone().requires_grad_() for name in OUTPUTS}

    def plain(self) -> Tensor:
        """The surrogate by hand; gradient of the live log-probs."""
        live = self.live["logprobs"].view(self.mask.shape)
        ratio = (live - self.padded["old_logprobs"]).exp()
        pull = self.advantages.unsqueeze(1)
        surrogate = torch.min(ratio * pull, ratio.clamp(0.8, 1.28) * pull)
        loss = -(surrogate * self.mask).sum() / self.mask.sum()
        return torch.autograd.grad(loss, self.live["logprobs"])[0]

    def pack(self, objective: Composition) -> TokenBatch:
        """The evidence that the objective reads, without padding."""
        wanted = {"logprobs", "old_logprobs", *(objective.needs & set(SIGNALS))}
        given = {name: self.padded[name] for name in sorted(wanted)}
        groups = torch.arange(len(self.mask)) // 8
        return TokenBatch.from_padded(response_mask=self.mask, advantages=self.advantages, group_ids=groups, **given)

    def loss(self, plan: Plan, batch: TokenBatch) -> tuple[Tensor | None, ...]:
        """Loss and backward."""
        outputs = {"logprobs": self.live["logprobs"]}
        outputs |= {name: self.live[name] for name in plan.objective.live_needs}
        loss = plan.loss(batch, PolicyOutputs(**outputs)).loss
        return torch.autograd.grad(loss, list(outputs.values()), allow_unused=True)


def cases(made: Step, objectives: dict[str, Composition]) -> dict[str, Case]:
    """Plain, and four for each objective."""
    timed = {"plain": Case(lambda _: made.plain())}
    for name, objective in objectives.items():
        timed |= _stages(made, name, objective)
    return timed


def _stages(made: Step, name: str, objective: Composition) -> dict[str, Case]:
    batch = made.pack(objective)
    return {
        f"{name}: pack": Case(lambda _: made.pack(objective)),
        f"{name}: plan": Case(lambda _: make_plan(objective, [batch])),
        f"{name}: loss": Case(lambda plan: made.loss(plan, batch), lambda: make_plan(objective, [batch])),
        f"{name}: stage": Case(lambda _: made.loss(make_plan(objective, [batch]), batch)),
    }


def chosen(counts: list[str], say: Callable[[str], None]) -> dict[str, Composition]:
    """The first methods by the name of the case, as many as it asks for, or all where there are fewer."""
    methods = stack()
    say(f"methods in order: {', '.join(method.name for method in methods)}")
    objectives: dict[str, Composition] = {}
    for text in counts:
        wanted = len(methods) if text == "all" else int(text)
        if wanted > len(methods):
            say(f"{wanted} methods: only {len(methods)} of the zoo compose with one another; taken are these")
        some = methods[:wanted]
        objectives["all" if text == "all" else str(wanted)] = compose(*some)
    return objectives


def main() -> None:
    arguments = parser(__doc__, repeat=7)
    arguments.add_argument("--tokens", default="64x4096", help="responses x tokens of each (default: 64x4096)")
    arguments.add_argument("--modules", default="0,1,5,10,all", help="how many methods")
    arguments.add_argument("--head", default="512x576x49152", help="tokens x width x vocabulary of the head")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", FitWarning)  # what a stack of all methods lacks is not the question here
    run = Run("modules", options.json)
    run.say()
    rows, length = map(int, options.tokens.split("x"))
    tokens, width, vocab = map(int, options.head.split("x"))
    problem = Problem(tokens, width, vocab, torch.float32)
    made = Step(rows, length)
    objectives = chosen(listed(options.modules), run.console.print)
    given, ones, law = inputs(problem), weights_of(problem, 1.0), HEADS["rlstab"].load()
    every = {**cases(made, objectives), "head": Case(lambda _: step(law, given, ones))}
    times, units = interleave(every, options.repeat)
    timed = measured(times, units)
    head = timed["head"]["cpu_s"] / tokens * rows * length
    drawn = Table("case", "methods", title=f"{rows} x {length} tokens, float32, forward and backward")
    for title in ("CPU ms", "x plain", "of the head"):
        drawn.add_column(title, justify="right")
    for name, values in timed.items():
        objective = objectives.get(name.partition(":")[0])
        extra = {} if name in ("plain", "head") else {"share_of_head": values["cpu_s"] / head}
        run.add(
            name,
            shape=[tokens, width, vocab] if name == "head" else [rows, length],
            dtype="float32",
            live=1.0,
            mode="fwdbwd",
            methods=[member.name for member in objective.members] if objective else [],
            **values,
            **extra,
        )
        drawn.add_row(
            name if name != "head" else f"head, {options.head}",
            str(len(objective.members)) if objective else "",
            f"{1000 * values['cpu_s']:.1f}",
            f"{values['cpu_s'] / timed['plain']['cpu_s']:.2f}",
            f"{extra['share_of_head']:.1e}" if extra else "",
        )
    run.console.print(drawn)


if __name__ == "__main__":
    main()
