"""What a teacher or a support costs in the head: time and memory of a forward and backward with it in the loss.

    python -m benchmarks distill --n 512 --d 512 --v 151936 --json

`head` has no teacher: the log-probs alone. `rlstab` and `trl` compare the whole distributions of two models of one
width; `top-k` compares the teacher's 64 likeliest tokens, which are found beforehand, as the sampler's would be.
`support` takes the log-probs over 64 tokens that a sampler kept. TRL's function gives no log-prob.
Loss and gradients of `rlstab` and `trl` are compared first. Memory is taken in a fresh process, beyond the inputs of
both models.
"""

import importlib.util
import json
import sys

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.heads import Inputs, Law, Problem, inputs, step, weights_of
from benchmarks.memory import peak_of
from benchmarks.protocol import Case, Run, assert_agree, child, interleave, measured, parser
from rlstab.signals import Teacher, TopK, token_signals

K = 64
CASES = ("head", "support", "top-k", "rlstab", "trl")


def teacher_of(problem: Problem) -> Teacher:
    """Another model of the same width, whose hidden states are near those of the policy."""
    given = inputs(problem, frozen=True)
    draw = torch.Generator().manual_seed(7)
    noise = torch.randn(given.hidden.shape, generator=draw, dtype=torch.float32).to(given.hidden.dtype)
    return Teacher((given.hidden + 0.3 * noise).detach(), given.weight.detach().clone())


def law_of(case: str, problem: Problem, beta: float) -> Law:
    """The loss of a case, the mean over live rows of minus the log-prob or of the divergence; all inputs exist."""
    if case == "support":
        kept = (inputs(problem).ids.unsqueeze(1) + torch.arange(K)) % problem.vocab
        return lambda given, weights, _: (-(weights * chosen(given, kept)).mean(), None, None)
    teacher: Teacher | TopK = teacher_of(problem)
    if case == "head":
        return lambda given, weights, _: (-(weights * chosen(given)).mean(), None, None)
    if case == "trl":
        return lambda given, weights, _: ((weights * by_trl(given, teacher, beta)).mean(), None, None)
    if case == "top-k":
        teacher = TopK.of(teacher, K, problem.vocab, 1.0)

    def law(given: Inputs, weights: Tensor, _: bool) -> tuple[Tensor, None, None]:
        signals = token_signals(
            *(given.hidden, given.weight, given.ids),
            needs={"logprobs", "teacher_divergence"},
            teacher=teacher,
            beta=beta,
        )
        return (weights * signals.teacher_divergence).mean(), None, None

    return law


def chosen(given: Inputs, support: Tensor | None = None) -> Tensor:
    """Log-probs of the tokens, over the vocabulary or a support."""
    needs = {"logprobs"} if support is None else {"logprobs", "log_support_mass"}
    signals = token_signals(given.hidden, given.weight, given.ids, needs=needs, support=support)
    assert signals.logprobs is not None
    return signals.logprobs if signals.log_support_mass is None else signals.logprobs - signals.log_support_mass


def by_trl(given: Inputs, teacher: Teacher, beta: float) -> Tensor:
    """The function behind the loss of TRL's DistillationTrainer."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    divergence: Tensor = ChunkedDivergenceFunction.apply(
        given.hidden, given.weight, None, teacher.hidden, teacher.weight, None, beta
    )[0]
    return divergence


def require_agreement(problem: Problem, beta: float) -> None:
    """Raises Disagreement: loss or gradients of both differ."""
    given, ones = inputs(problem), weights_of(problem, 1.0)
    ours, theirs = (law_of(case, problem, beta) for case in ("rlstab", "trl"))
    assert_agree("loss", ours(given, ones, False)[0], theirs(given, ones, False)[0], allowed=1e-5, relative=True)
    gradients = [step(law, given, ones).gradients for law in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        assert_agree("gradients", mine, other, allowed=1e-4, relative=True)


def timed(problem: Problem, cases: list[str], beta: float, repeat: int) -> dict[str, dict[str, object]]:
    """The cases in turns."""
    given, ones = inputs(problem), weights_of(problem, 1.0)

    def case(law: Law) -> Case:
        return Case(lambda _: step(law, given, ones))

    def unit() -> Tensor:
        return torch.mm(given.hidden.detach(), given.weight.detach().t())

    laws = {name: law_of(name, problem, beta) for name in cases}
    return measured(*interleave({name: case(law) for name, law in laws.items()}, repeat, unit))


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        asked = json.loads(sys.argv[1])
        torch.set_num_threads(asked["threads"])
        problem, tiny = Problem(*asked["shape"], torch.float32), Problem(8, asked["shape"][1], 64, torch.float32)
        laws = [law_of(asked["case"], each, asked["beta"]) for each in (tiny, problem)]
        print(json.dumps(peak_of(*laws, tiny, problem, 1.0)))
        return
    arguments = parser(__doc__, repeat=3)
    arguments.add_argument("--n", type=int, default=256, help="tokens (default: 256)")
    arguments.add_argument("--d", type=int, default=1024, help="width of both models (default: 1024)")
    arguments.add_argument("--v", type=int, default=151936, help="vocabulary (default: 151936)")
    arguments.add_argument("--beta", type=float, default=1.0, help="which divergence (default: 1.0)")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    run, problem = Run("distill", options.json), Problem(options.n, options.d, options.v, torch.float32)
    run.say()
    cases = [case for case in CASES if case != "trl" or importlib.util.find_spec("trl") is not None]
    if "trl" in cases:
        require_agreement(Problem(64, 32, 512, torch.float32), options.beta)
    times = timed(problem, cases, options.beta, options.repeat)
    about = {"shape": problem.shape, "dtype": "float32", "beta": options.beta}
    drawn = Table("case", "CPU s", "G", "MiB", "MiB of gradients", title=" x ".join(map(str, problem.shape)))
    for case in cases:
        asked = {**about, "case": case, "threads": options.threads}
        record = run.add(**about, case=case, **times[case], **child("benchmarks.distill", asked))
        names = ("cpu_s", "g_units", "peak_mib", "gradients_mib")
        drawn.add_row(case, *(f"{record[name]:.2f}" for name in names))
    run.console.print(drawn)


if __name__ == "__main__":
    main()
