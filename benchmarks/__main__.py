"""`python -m benchmarks NAME ...`, from the root of a clone; `python -m benchmarks NAME --help` says what it takes."""

import importlib
import os
import sys

# read once, when torch starts its threads: a waiting thread that spins would be counted as work
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

NAMES = {
    "head": "signals from the vocabulary head, forward and backward, against other heads",
    "distill": "what a teacher costs in the head, and TRL's pass over two models",
    "modules": "the methods of the zoo on top of the head, against a plain GRPO loss",
    "collectives": "what a plan asks of other ranks: collectives and bytes, counted",
    "waits": "how often the host waits for a device, counted on a simulated one",
    "gpu": "what only an accelerator can tell: correctness, speed, memory; and the rows of docs/performance.md",
    "quantile": "exact quantiles of a whole step against torch.quantile",
    "e2e": "forward and backward of a whole model of 134.5M parameters",
    "prompts": "forward and backward over responses that share their prompts, against whole rows",
    "throughput": "whole training steps against TRL's GRPOTrainer",
    "trl_adapter": "an objective inside TRL's trainer against its own loss",
    "verl_adapter": "an objective inside verl's actor against its own loss",
    "diagnose": "how often `rlstab look` names the right first cause, on runs broken on purpose",
    "generated": "the same on the runs that rldoctor and rlprobe generate, and the two on ours",
    "real_logs": "what `rlstab look` and rldoctor say of published runs, one row for each log",
    "damage": "commands on damaged files and extreme numbers: tracebacks and waits, counted",
    "evidence": "rlstab/look/evidence.json from the results that are kept, and docs/troubleshooting.md",
    "check": "the goals that hold on any machine, on a small shape; exit 1 where a must fails",
    "report": "all goals from the results that are kept, and docs/performance.md",
    "instabilities": "the pictures of docs/concepts/instabilities.md",
    "intervals": "how often the intervals of a report hold the truth, and the tables of docs/how-to/compare.md",
    "split": "how much gradients move when a step is cut into micro-batches",
    "published": "the numbers of published code in tests/conformance/data, again",
    "foreign": "the exports of other trainers in tests/replay/data, by their own writers",
    "mutation": "would the tests notice a change?",
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        known = "\n".join(f"  {name:<15}{about}" for name, about in NAMES.items())
        print(f"python -m benchmarks NAME ...\n\n{known}")
        sys.exit(0 if sys.argv[1:] in ([], ["-h"], ["--help"]) else 2)
    name = sys.argv[1]
    sys.argv = [f"python -m benchmarks {name}", *sys.argv[2:]]
    importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
