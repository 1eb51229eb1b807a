"""What only an accelerator can tell, by one command, without a network; under 8 minutes on an H100.

    python -m benchmarks gpu
    python -m benchmarks gpu --device cpu --small      # the same paths on any machine; its figures are not kept

The tests of tests/device on the device itself; equal runs, one that was killed and one that was cut otherwise; the
vocabulary head against others, by the clock of the device; sampled tokens a second; whole steps at the shape of
SmolLM2-135M with random weights, ours and TRL's. A package that is missing makes a row that says so. Each row is a line
of results/gpu.jsonl, and the newest run is a table of docs/performance.md.
"""

import importlib.util
import io
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.heads import HEADS, Head, Inputs, Problem, inputs, step, weights_of
from benchmarks.protocol import ROOT, Disagreement, Record, Run, child, error, parser
from benchmarks.throughput import Job
from rlstab.config import RunConfig
from rlstab.train import train
from tests.train.runs import file_of, small

RESULTS = ROOT / "benchmarks" / "results" / "gpu.jsonl"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- gpu: written by `python -m benchmarks gpu` -->", "<!-- end of gpu -->"
#: Tokens, width, vocabulary: as the presets of these names of `python -m benchmarks head`.
SHAPES = {"A": (2048, 576, 49152), "B": (2048, 1024, 151936), "C": (8192, 576, 49152)}
#: Rows whose gradients are compared with float64.
AGREE = 256
#: Dense bfloat16 products of a card from its data sheet, in 10^12 operations a second: what an MFU is a share of.
PEAK = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0}
_NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
SMOLLM2 = dict(zip(_NAMES, (576, 1536, 30, 9, 3, 49152), strict=True))
TINY = dict(zip(_NAMES, (32, 64, 2, 2, 1, 300), strict=True))
#: Of the runs of countdown-tiny that are compared.
LARGER = {"rollout__prompts": 16, "rollout__group": 8, "rollout__max_new_tokens": 24}


def _head(record: Record) -> str:
    memory = f", {record['peak_mib']:.0f} MiB" if record.get("peak_mib") is not None else ""
    return f"{record['name']} {record['dense_ms']:.2f} and {record['live_ms']:.2f} ms{memory}"


def _step(record: Record) -> str:
    share = f", MFU {record['mfu']:.0%}" if record.get("mfu") else ""
    decoded = f", {record['decoded']:.0f} tokens/s decoded" if record.get("decoded") else ""
    return f"{record['name']} {record['wall_s']:.2f} s{decoded}{share}"


#: The rows of the page: a pattern of cases, what they say, and from a record to a cell.
ROWS: Sequence[tuple[str, str, Callable[[Record], str]]] = (
    ("tests/device", "tests/device on the card, passed and failed", lambda r: f"{r['passed']} and {r['failed']}"),
    ("equal runs", "two equal runs are equal bit for bit", lambda r: str(r["equal"])),
    ("killed run", "a run that was killed and resumed equals one that was not", lambda r: str(r["equal"])),
    ("split, fp32", "gradient norm in micro-batches of 3 and of 128, fp32", lambda r: f"{r['moved']:.1e} apart"),
    ("split, bf16", "the same in bf16", lambda r: f"{r['moved']:.1e} apart"),
    *(
        (f"head {shape}", f"head, forward and backward, {shape} in bf16, dense and 20 % live", _head)
        for shape in SHAPES
    ),
    ("step", "a step of 128 responses of 128 tokens, SmolLM2-135M's shape, bf16", _step),
)


# -- correctness -----------------------------------------------------------------------------------------------------


def tests(device: torch.device, few: bool) -> Iterator[Record]:
    """The tests of tests/device, on the device itself."""
    if importlib.util.find_spec("pytest") is None:
        yield {"case": "tests/device", "skipped": "pytest is not installed"}
        return
    files = sorted(map(str, (ROOT / "tests" / "device").glob("on_device_*.py")))
    chosen = ["-k", "token_signals"] if few else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", *chosen]
    env = os.environ | {"RLSTAB_ON_DEVICE": device.type}
    ran = subprocess.run([*command, *files], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    found = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", ran.stdout)}
    failed = found.get("failed", 0) + found.get("error", 0)
    told = {} if ran.returncode == 0 else {"output": (ran.stdout + ran.stderr)[-4000:]}
    yield {"case": "tests/device", "passed": found.get("passed", 0), "failed": failed, **told}


def records(run: RunConfig, *, resume: bool = False) -> list[dict[str, Any]]:
    """The metrics of a run, less what a clock measured."""
    lines = train(run, resume=resume, console=Console(file=io.StringIO())).records
    return [{name: value for name, value in line.items() if not name.startswith("seconds/")} for line in lines]


def killed(run: RunConfig) -> list[dict[str, Any]]:
    """The same of a run that is killed once it has a checkpoint, and resumed."""
    command, out = [sys.executable, "-m", "rlstab", "train", str(file_of(run))], Path(run.tracking.out)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not [*out.glob("checkpoints/rollout-*/trainer.json")]:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    return records(run, resume=True)


def runs(folder: Path, shape: dict[str, int]) -> Iterator[Record]:
    """Two equal runs, one that was killed and resumed, and runs that were cut into other micro-batches."""
    several = {"optimisation__rollouts": 4, "tracking__checkpoint_every": 1, **shape}
    first, second = (records(small(folder / name, **several)) for name in ("first", "second"))
    yield {"case": "equal runs", "equal": first == second, "lines": len(first)}
    after = killed(small(folder / "killed", **several))
    yield {"case": "killed run", "equal": first == after, "lines": len(after)}
    for precision in ("fp32", "bf16"):
        cut = {"optimisation__rollouts": 1, "optimisation__precision": precision, **shape}
        norms = [
            records(small(folder / f"{precision}-{size}", optimisation__micro_batch_size=size, **cut))[0][
                "gradient/norm"
            ]
            for size in (128, 3)
        ]
        yield {"case": f"split, {precision}", "moved": abs(norms[1] / norms[0] - 1)}


def tried(about: Record, package: str | None, work: Callable[[], Record]) -> Record:
    """A row, or one that says why it has no figures: a kernel of another project may not run on this card."""
    if package is not None and importlib.util.find_spec(package) is None:
        return {**about, "skipped": f"{package} is not installed"}
    try:
        return {**about, **work()}
    except Exception as failure:
        return {**about, "skipped": f"{type(failure).__name__}: {failure}"[:200]}


# -- speed -----------------------------------------------------------------------------------------------------------


def milliseconds(work: Callable[[], object], device: torch.device, repeat: int) -> float:
    """The median of the repetitions by events of the device; two before them do not count."""
    times = []
    for _ in range(repeat + 2):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            times.append(float(first.elapsed_time(last)))
        else:
            start = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def peak_mib(work: Callable[[], object], device: torch.device) -> float | None:
    """Most memory of the work beyond what was there before; None where the device does not say."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def placed(given: Inputs, device: torch.device, dtype: torch.dtype, rows: int) -> Inputs:
    """The first rows on a device."""
    hidden, weight = (values.detach().to(device, dtype) for values in (given.hidden[:rows], given.weight))
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), given.ids[:rows].to(device))


def require_agreement(head: Head, given: Inputs, device: torch.device, weights: Tensor) -> None:
    """Compare the gradients of a head with those of the plain log-softmax in float64 on the CPU.

    Raises:
        Disagreement: they are further from it than the slack of the head times those of the plain one in bfloat16.
    """
    rows = min(AGREE, given.ids.numel())

    def gradients(law: Any, where: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        made = step(
            law, placed(given, where, dtype, rows), weights[:rows].to(where, torch.promote_types(dtype, torch.float32))
        )
        return tuple(values.cpu() for values in made.gradients)

    naive, cpu = HEADS["naive"].load(), torch.device("cpu")
    exact = gradients(naive, cpu, torch.float64)
    plain, mine = (gradients(law, device, torch.bfloat16) for law in (naive, head.load()))
    for number, truth in enumerate(exact):
        far, allowed = (error(values[number], truth, relative=True) for values in (mine, plain))
        if not far <= head.slack * allowed:
            raise Disagreement(f"gradient {number}: relative error {far:.1e}, {allowed:.1e} of the plain log-softmax")


def head_times(head: Head, problem: Problem, device: torch.device, repeat: int) -> Record:
    """Forward and backward in bfloat16, with all rows live and with a fifth of them; and the memory of the latter."""
    made, law, spent = inputs(problem), head.load(), {}
    require_agreement(head, made, device, weights_of(problem, 0.2))
    given = placed(made, device, torch.bfloat16, problem.tokens)
    for key, live in (("dense_ms", 1.0), ("live_ms", 0.2)):
        weights = weights_of(problem, live).to(device)

        def both(weights: Tensor = weights) -> object:
            return torch.autograd.grad(law(given, weights, False)[0], given.trained)

        spent[key] = milliseconds(both, device, repeat)
    return {**spent, "peak_mib": peak_mib(both, device)}


def heads(device: torch.device, repeat: int, shapes: dict[str, tuple[int, int, int]]) -> Iterator[Record]:
    """Ours, the plain log-softmax and those of others, at each shape."""
    for shape, sizes in shapes.items():
        for name in ("rlstab", "naive", "trl", "liger"):
            about = {"case": f"head {shape}", "name": name, "shape": list(sizes)}
            work = partial(head_times, HEADS[name], Problem(*sizes, torch.bfloat16), device, repeat)
            yield tried(about, HEADS[name].package, work)


def random_model(folder: Path, sizes: dict[str, int]) -> str:
    """A folder with random weights, and a tokenizer that has a word for each of its tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(3, sizes["vocab_size"]))]
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder)
    config = LlamaConfig(
        **sizes, tie_word_embeddings=True, max_position_embeddings=2048, pad_token_id=0, eos_token_id=1
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def steps(folder: Path, card: str, *, few: bool) -> Iterator[Record]:
    """Whole steps of two trainers; MFU is 6 operations for each weight and token, over only the time of learning."""
    sizes = TINY if few else SMOLLM2
    job = Job(
        random_model(folder / "model", sizes),
        {"name": f"{ROOT / 'tests' / 'train' / 'own.py'}:Graded"},
        prompts=2 if few else 16,
        group=4 if few else 8,
        new_tokens=8 if few else 128,
        micro_batch=8 if few else 64,
        precision="bf16",
        lr=1e-6,
        steps=1 if few else 3,
        warmup=1,
    )
    width, layers, vocabulary = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["vocab_size"]
    keys = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    weights = layers * (2 * width * (width + keys) + 3 * width * sizes["intermediate_size"]) + width * vocabulary
    peak = next((value for name, value in PEAK.items() if name in card), None)
    for name in ("rlstab", "trl"):

        def whole(name: str = name) -> Record:
            seen: Record = child("benchmarks.throughput", {"trainer": name, "job": asdict(job), "threads": 8})
            tokens = job.samples * seen["mean_tokens"]
            more = {"decoded": tokens / seen["sample_s"]} if "sample_s" in seen else {}
            if peak and "train_s" in seen:
                more["mfu"] = 6 * weights * tokens / seen["train_s"] / (peak * 1e12)
            return {**seen, **more}

        yield tried({"case": "step", "name": name}, name, whole)


# -- the page --------------------------------------------------------------------------------------------------------


def table(found: Sequence[Record]) -> str:
    """The rows of docs/performance.md from the records of one run; what it does not have is not measured."""
    lines = ["| on a GPU | measured |", "| --- | --- |"]
    for case, about, cell in ROWS:
        mine = [record for record in found if record["case"] == case]
        cells = [
            f"{record.get('name', '')} {record['skipped']}".strip() if "skipped" in record else cell(record)
            for record in mine
        ]
        lines.append(f"| {about} | {'; '.join(cells) or 'not measured'} |")
    card = {record["card"] for record in found}
    return "\n".join([*lines, *([f"\nOn: {', '.join(sorted(card))}."] if card else [])])


def publish(found: Sequence[Record]) -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    arguments = parser(__doc__, repeat=10)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--small", action="store_true", help="small shapes: that it runs; no figures are kept")
    options = arguments.parse_args()
    device, few = torch.device(options.device), options.small
    if device.type == "cpu" and torch.cuda.is_available():
        arguments.error("the trainer takes the GPU that it sees; start with CUDA_VISIBLE_DEVICES= in the environment.")
    if device.type == "cpu" and not few:
        arguments.error("there is no GPU here. --device cpu --small tries whether everything runs.")
    card = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    run = Run("gpu", options.json or (None if few else RESULTS))
    run.say()
    with tempfile.TemporaryDirectory() as folder:
        parts = (
            tests(device, few),
            runs(Path(folder), {"model__name": "countdown-tiny"} | ({} if few else LARGER)),
            heads(device, 1 if few else options.repeat, {"A": (64, 32, 512)} if few else SHAPES),
            steps(Path(folder), card, few=few),
        )
        for part in parts:
            for record in part:
                case = record.pop("case")
                run.console.print(case, record, highlight=False)
                run.add(case, card=card, **record)
    print(table(run.records))
    if not few:
        publish(run.records)
