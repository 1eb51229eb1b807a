"""What signals cost from hidden states, forward and backward, where a share of the rows has a loss.

    python -m benchmarks head --preset S --json
    python -m benchmarks head --preset A --dtype bfloat16 --live 0.2 --against naive,trl,trl-logits,liger --json

Modes: `fwd` signals without gradient (log-probs, entropies; ours the largest log-prob too), `fwd+sum_p_sq` one signal
more (ours), `bwd` only our backward, `fwdbwd` both, entropies without gradient, `fwdbwd-entropy` entropy in the loss,
`frozen` a head without gradient, `memory` the peak of `fwdbwd` in a fresh process, `error` the gradient's distance from
float64. `G` is a time over that of a bare product of hidden states and weight in the same run: a dense pass that keeps
its logits needs 3, one that makes them again 4, and one that leaves out rows without gradient 1 + 3 * live.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from benchmarks.heads import (
    HEADS,
    Inputs,
    Law,
    Problem,
    assert_heads_agree,
    inputs,
    installed,
    step,
    weights_of,
)
from benchmarks.protocol import Case, Run, child, error, interleave, listed, measured, parser
from rlstab.signals import token_signals

#: tokens, width, vocabulary. S and M are for `check`, E fits a float64 reference, 1 is a single token.
PRESETS = {
    "S": (512, 256, 8192),
    "A": (2048, 576, 49152),
    "B": (2048, 1024, 151936),
    "C": (8192, 576, 49152),
    "E": (512, 576, 16384),
    "M": (4096, 64, 16384),
    "1": (1, 576, 49152),
}
OWN = "rlstab"
TIMED = ("fwd", "fwd+sum_p_sq", "bwd", "fwdbwd", "fwdbwd-entropy", "frozen")
MODES = (*TIMED, "memory", "error")
OWN_ONLY = {"fwd+sum_p_sq", "bwd"}
FORWARD = {"logprobs", "entropies", "max_logprobs"}


@dataclass(frozen=True)
class Key:
    """What tells one case of a run from another."""

    case: str
    mode: str
    live: float | None
    rows: str = "random"

    def alike(self, other: Key) -> bool:
        """The same work, so a ratio says something."""
        return (self.mode, self.live, self.rows) == (other.mode, other.live, other.rows)

    def __str__(self) -> str:
        return f"{self.case} {self.mode}" + ("" if self.live is None else f", live {self.live:g}, {self.rows}")


def cases(
    laws: dict[str, Law],
    trainable: Inputs,
    frozen: Inputs,
    problem: Problem,
    modes: list[str],
    lives: list[float],
    blocks: bool = True,
) -> Iterator[tuple[Key, Case]]:
    """All that take turns."""
    for mode in (mode for mode in TIMED if mode in modes):
        if mode in ("fwd", "fwd+sum_p_sq"):
            needs = FORWARD | ({"sum_p_sq"} if mode == "fwd+sum_p_sq" else set())
            yield Key(OWN, mode, None), _signals(trainable, needs)
            ones = weights_of(problem, 1.0)
            for name, law in laws.items():
                if mode == "fwd" and name != OWN and HEADS[name].entropy:
                    yield Key(name, mode, None), _forward(law, trainable, ones)
            continue
        for live in lives:
            for rows in ("random", "block") if blocks else ("random",):
                weights = weights_of(problem, live, block=rows == "block")
                for name, law in laws.items():
                    if name != OWN and (mode in OWN_ONLY or rows == "block"):
                        continue
                    if (rows == "block" and not 0 < live < 1) or (mode == "fwdbwd-entropy" and not HEADS[name].entropy):
                        continue
                    key = Key(name, mode, live, rows)
                    if mode == "bwd":
                        yield key, _backward(law, trainable, weights)
                    else:
                        given = frozen if mode == "frozen" else trainable
                        yield key, _both(law, given, weights, mode == "fwdbwd-entropy")


def _signals(given: Inputs, needs: set[str]) -> Case:
    return Case(torch.no_grad()(lambda _: token_signals(given.hidden, given.weight, given.ids, needs=needs)))


def _forward(law: Law, given: Inputs, weights: torch.Tensor) -> Case:
    return Case(torch.no_grad()(lambda _: law(given, weights, False)))


def _backward(law: Law, given: Inputs, weights: torch.Tensor) -> Case:
    return Case(lambda loss: torch.autograd.grad(loss, given.trained), lambda: law(given, weights, False)[0])


def _both(law: Law, given: Inputs, weights: torch.Tensor, entropy: bool) -> Case:
    return Case(lambda _: step(law, given, weights, entropy=entropy))


def time_heads(
    run: Run,
    preset: str,
    problem: Problem,
    laws: dict[str, Law],
    modes: list[str],
    lives: list[float],
    repeat: int,
    *,
    blocks: bool = True,
) -> None:
    """The timed modes of one shape and dtype; agreement first."""
    trainable, frozen = inputs(problem), inputs(problem, frozen=True)
    for mode, given, entropy in (
        ("fwdbwd", trainable, False),
        ("fwdbwd-entropy", trainable, True),
        ("frozen", frozen, False),
    ):
        if mode in modes or mode == "fwdbwd":
            assert_heads_agree(laws, given, entropy=entropy)
    all_cases = dict(cases(laws, trainable, frozen, problem, modes, lives, blocks))
    if not all_cases:
        return
    hidden, weight = trainable.hidden.detach(), trainable.weight.detach()
    keys = {str(key): key for key in all_cases}
    times, units = interleave(
        {str(key): case for key, case in all_cases.items()}, repeat, lambda: torch.mm(hidden, weight.t())
    )
    for name, values in measured(times, units).items():
        key = keys[name]
        values["ratio_to"] = {keys[o].case: ratio for o, ratio in values["ratio_to"].items() if key.alike(keys[o])}
        run.add(**_about(preset, problem, key), **values)


def _about(preset: str, problem: Problem, key: Key) -> dict[str, Any]:
    return {
        "case": key.case,
        "preset": preset,
        "shape": problem.shape,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "live": key.live,
        "mode": key.mode,
        "rows": key.rows,
        "handicap": HEADS[key.case].handicap,
    }


def weigh(run: Run, preset: str, problem: Problem, heads: list[str], live: float) -> None:
    """Peak memory of a forward and backward, each head in its own process."""
    for head in heads:
        peak = child(
            "benchmarks.memory",
            {
                "head": head,
                "tokens": problem.tokens,
                "width": problem.width,
                "vocab": problem.vocab,
                "dtype": str(problem.dtype).removeprefix("torch."),
                "live": live,
                "frozen": False,
                "threads": torch.get_num_threads(),
            },
        )
        run.add(**_about(preset, problem, Key(head, "memory", live)), **peak)


def err(run: Run, preset: str, problem: Problem, laws: dict[str, Law]) -> None:
    """Relative L2 distance of both gradients from float64 on the same inputs, all rows live."""
    given, weights = inputs(problem), weights_of(problem, 1.0)
    truth = step(HEADS["naive"].load(), given.to(torch.float64), weights.double())
    for name, law in laws.items():
        outcome = step(law, given, weights)
        distances = [error(a, b, relative=True) for a, b in zip(outcome.gradients, truth.gradients, strict=True)]
        run.add(
            **_about(preset, problem, Key(name, "error", 1.0)),
            hidden_error=distances[0],
            weight_error=distances[1],
            gradient_error=max(distances),
        )


def table(run: Run) -> None:
    """Everything that was found, a table for each shape and dtype."""
    groups = dict.fromkeys((record["preset"], tuple(record["shape"]), record["dtype"]) for record in run.records)
    columns = (
        ("CPU s", "cpu_s", ".3f"),
        ("wall s", "wall_s", ".3f"),
        ("G", "g_units", ".2f"),
        ("it / rlstab", "over_own", ".2f"),
        ("MiB", "peak_mib", ".0f"),
        ("beyond grads", "workspace_mib", ".0f"),
        ("grad error", "gradient_error", ".2e"),
    )
    for preset, shape, dtype in groups:
        records = [record for record in run.records if (record["preset"], record["dtype"]) == (preset, dtype)]
        drawn = Table("mode", "live", "case", title=f"{preset}: {' x '.join(map(str, shape))}, {dtype}")
        there = {name for record in records for name, value in record.items() if value} | {
            "over_own" for record in records if record.get("ratio_to")
        }
        shown = [column for column in columns if column[1] in there]
        for title, *_ in shown:
            drawn.add_column(title, justify="right")
        for record in sorted(
            records, key=lambda record: (MODES.index(record["mode"]), -(record["live"] or 0), record["rows"])
        ):
            ratio = record.get("ratio_to", {}).get(OWN)
            values = {**record, "over_own": 1 / ratio if ratio else None}
            live = (
                "-" if record["live"] is None else f"{record['live']:g}{' block' if record['rows'] == 'block' else ''}"
            )
            cells = ("" if values.get(name) is None else f"{values[name]:{form}}" for _, name, form in shown)
            drawn.add_row(record["mode"], live, record["case"], *cells)
        run.console.print(drawn)
    for name in dict.fromkeys(record["case"] for record in run.records if record["handicap"]):
        run.console.print(f"{name}: {HEADS[name].handicap}", highlight=False)


def rows_differ(run: Run, allowed: float = 0.1) -> list[str]:
    """Where a block of live rows costs more or less than as many random ones; both times are least CPU-seconds."""
    labels = []
    for record in run.records:
        if record["rows"] == "block":
            same = ("case", "preset", "dtype", "live", "mode")
            twin = next(o for o in run.records if o["rows"] == "random" and all(o[n] == record[n] for n in same))
            apart = record["cpu_s"] / twin["cpu_s"] - 1
            if abs(apart) > allowed:
                labels.append(
                    f"{record['preset']} {record['dtype']} {record['mode']}, live {record['live']:g}: a block of rows "
                    f"costs {apart:+.0%} of random ones; rule 5 allows {allowed:.0%}"
                )
    return labels


def main() -> None:
    arguments = parser(__doc__, repeat=5)
    arguments.add_argument("--preset", default="S", help="comma-separated: " + ", ".join(PRESETS))
    arguments.add_argument("--n", type=int, help="tokens, instead of a preset")
    arguments.add_argument("--d", type=int, help="width, instead of a preset")
    arguments.add_argument("--v", type=int, help="vocabulary, instead of a preset")
    arguments.add_argument("--dtype", default="float32,bfloat16")
    arguments.add_argument("--live", default="0,0.05,0.2,1", help="shares of rows with a loss")
    arguments.add_argument("--mode", default="fwd,fwdbwd", help="comma-separated: " + ", ".join(MODES))
    arguments.add_argument("--against", default="naive", help="comma-separated: " + ", ".join(list(HEADS)[1:]))
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    run = Run("head", options.json)
    run.say()
    modes, lives = listed(options.mode), [float(live) for live in listed(options.live)]
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        arguments.error(f"no mode is called '{unknown[0]}'. Known: {', '.join(MODES)}.")
    laws = installed([OWN, *listed(options.against)], run.console.print)
    own_shape = (options.n, options.d, options.v)
    if any(own_shape) and not all(own_shape):
        arguments.error("--n, --d and --v go together.")
    shapes = {"own": own_shape} if all(own_shape) else {name: PRESETS[name] for name in listed(options.preset)}
    for preset, shape in shapes.items():
        for dtype in listed(options.dtype):
            problem = Problem(*shape, getattr(torch, dtype))
            if set(modes) & set(TIMED):
                time_heads(run, preset, problem, laws, modes, lives, options.repeat)
            if "memory" in modes:
                for live in lives:
                    weigh(run, preset, problem, list(laws), live)
            if "error" in modes:
                err(run, preset, problem, laws)
    table(run)
    for line in rows_differ(run):
        run.console.print(f"[yellow]{line}[/]")


if __name__ == "__main__":
    main()
