"""`make test-matrix`: the tests on every Python, torch and processor that README promises, on one machine.

Every two values of two columns of ``MATRIX`` meet at least once, in as few runs of the suite as that takes. The
configurations of one Python and one torch share an environment in `.nox`. torch comes from where pip is told to look:
its CPU builds are enough. ``nox -s lowest`` and ``nox -s newest`` run the tests at both ends of what pyproject.toml
allows.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import nox

#: Python, torch, instructions, threads
MATRIX = [
    ("3.11", "2.9", "sse4", 1),
    ("3.12", "2.13", "sse4", 2),
    ("3.11", "2.13", "avx2", 1),
    ("3.12", "2.9", "avx2", 2),
    ("3.11", "2.13", "avx512", 2),
    ("3.12", "2.9", "avx512", 1),
    ("3.13", "2.13", "sse4", 1),
    ("3.13", "2.9", "avx512", 2),
    ("3.13", "2.13", "avx2", 2),
]
#: What an x86 processor without the later instructions makes of torch, MKL and oneDNN. The last has all of its own.
INSTRUCTIONS = {
    "sse4": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "DEFAULT"},
}
CAPABILITY = "import torch; print(torch.backends.cpu.get_cpu_capability())"
SEEN = """
import platform, torch
seen = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
print(f"Python {platform.python_version()}, torch {torch.__version__}, {seen}")
"""

#: What holds the losses of hosts to the cut.
LOSSES = "tests/testing/test_cut_free.py"

nox.options.error_on_missing_interpreters = True
nox.options.download_python = "never"


def environment(python: str, torch: str) -> str:
    """Name of the environment of a Python and a torch."""
    return f"py{python}-torch{torch}".replace(".", "")


def install(python: str, torch: str) -> None:
    """Declare the session that builds an environment."""

    @nox.session(name=environment(python, torch), python=python, reuse_venv=True, default=False)
    def build(session: nox.Session) -> None:
        # the pinned versions, but for torch
        pins = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
        constraints = Path(session.create_tmp()) / "constraints.txt"
        constraints.write_text("\n".join(pin for pin in pins if pin.split("==")[0] != "torch"), encoding="utf-8")
        try:
            session.install("-c", str(constraints), f"torch=={torch}.*", "-e", ".[dev]")
        except nox.command.CommandFailed:
            session.error(f"pip found no torch {torch} for Python {python}, or not what it needs: see above")

    build.__doc__ = f"The environment of Python {python} and torch {torch}."


def test(python: str, torch: str, instructions: str, threads: int) -> None:
    """Declare the session that runs the tests under one configuration."""
    built = environment(python, torch)

    @nox.session(name=f"{built}-{instructions}-{threads}", venv_backend="none", requires=[built])
    def run(session: nox.Session) -> None:
        interpreter = session.cache_dir.parent / built / "bin" / "python"
        own = {name: None for one in INSTRUCTIONS.values() for name in one}

        def ask(code: str, env: dict[str, str | None]) -> str:
            return str(
                session.run(str(interpreter), "-c", code, env=env, silent=True, external=True, log=False)
            ).strip()

        has, wanted = ask(CAPABILITY, own), INSTRUCTIONS[instructions]["ATEN_CPU_CAPABILITY"].upper()
        order = ["DEFAULT", "AVX2", "AVX512"]
        if has not in order or order.index(has) < order.index(wanted):
            session.skip(f"this processor has no {instructions}: torch runs its {has} kernels")
        env = {**INSTRUCTIONS[instructions], "OMP_NUM_THREADS": str(threads)}
        session.log(ask(SEEN, env))
        workers = max(1, (os.cpu_count() or 1) // threads)
        session.run(str(interpreter), "-m", "pytest", "-n", str(workers), *session.posargs, env=env, external=True)

    run.__doc__ = f"The tests on Python {python}, torch {torch}, {instructions} instructions, {threads} thread(s)."


@nox.session(python="3.11", reuse_venv=True, default=False)
def trl(session: nox.Session) -> None:
    """The tests of the adapter for TRL, with the release that they name; elsewhere they are skipped."""
    own = "torch==2.13.0", "trl==1.16.0", "hypothesis>=6.120", "-e", ".[train,report,tasks,lora,trl,testing]"
    session.install("-c", "constraints.txt", *own)
    env = {"OMP_NUM_THREADS": "1", "RLSTAB_REQUIRE_TRL": "1"}
    session.run("rlstab", "doctor", env=env)
    session.run("python", "-m", "pytest", "tests/adapters", "tests/replay", LOSSES, *session.posargs, env=env)
    # two objectives in TRL, three seeds each, by a bench file: three minutes
    session.run("python", "-m", "pytest", "tests/adapters/test_trl_bench.py", "-m", "slow", env=env)
    # the stored numbers of TRL are still what TRL gives
    session.run("python", "-m", "pytest", "tests/conformance", "-m", "slow", "-k", "trl", env=env)


@nox.session(python="3.11", reuse_venv=True, default=False)
def trl_own(session: nox.Session) -> None:
    """TRL's own GRPO tests by TRL's trainer and by the adapter's: ``nox -s trl_own -- FOLDER``, a copy of TRL's tests.

    ``--stand-ins`` needs no hub; ``--limit`` is for each test, in seconds; other arguments are those of pytest.
    """
    if not session.posargs:
        session.error("give the path of a copy of TRL's repository, or of its tests: nox -s trl_own -- FOLDER")
    own = "torch==2.13.0", "trl==1.16.0", "pytest-timeout", "-e", ".[train,lora,trl,testing]"
    session.install("-c", "constraints.txt", *own)
    session.run("python", "-m", "tests.adapters.trl_own", *session.posargs, env={"OMP_NUM_THREADS": "1"})


def trl_release(release: str) -> None:
    """Declare the session that tests the adapter with an older release."""

    @nox.session(name=f"trl-{release}", python="3.11", default=False)
    def older(session: nox.Session) -> None:
        own = "torch==2.13.0", "transformers==5.23.*", "hypothesis>=6.120", "-e", ".[train,tasks,lora,testing]"
        session.install(*own, f"trl=={release}")
        session.run("rlstab", "doctor", env=env_of("trl"))
        session.run("python", "-m", "pytest", "tests/adapters", *session.posargs, env=env_of("trl"))

    older.__doc__ = f"The tests of the adapter for TRL with TRL {release}."


for older in ("1.12.0", "1.13.0", "1.14.1"):
    trl_release(older)


@nox.session(python="3.11", reuse_venv=True, default=False)
def extras(session: nox.Session) -> None:
    """The tests of what needs packages that `dev` may lack; elsewhere they are skipped without them."""
    session.install("-c", "constraints.txt", "torch==2.13.0", "-e", ".[dev,lora,datasets]")
    env = {"OMP_NUM_THREADS": "1", "RLSTAB_REQUIRE_EXTRAS": "1"}
    session.run(
        "python",
        "-m",
        "pytest",
        "tests/train/test_split.py",
        "tests/train/test_resume.py",
        "tests/tasks/test_data_set.py",
        env=env,
    )


@nox.session(python="3.11", reuse_venv=True, default=False)
def tex(session: nox.Session) -> None:
    """The LaTeX table of `rlstab report --paper` compiles, by the system's texlive-latex-recommended."""
    session.run("pdflatex", "--version", external=True, silent=True)
    session.install("-c", "constraints.txt", "torch==2.13.0", "hypothesis>=6.120", "-e", ".[testing,report,paper]")
    session.run("python", "-m", "pytest", "tests/report/test_paper.py", "-m", "slow or not slow", env=env_of("tex"))


@nox.session(python="3.11", reuse_venv=True, default=False)
def signs(session: nox.Session) -> None:
    """The tables of docs/how-to/diagnose.md: rlstab, rldoctor, rlprobe and rlwatch on each other's broken runs.

    And what martingale makes of the sampler of a dump.
    """
    others = "rldoctor==0.2.0", "rlprobe==0.1.0", "rlwatch==0.5.1", "martingale==0.2.0"
    own = "torch==2.13.0", "hypothesis>=6.120", "-e", ".[testing,report]"
    session.install("-c", "constraints.txt", *own, *others)
    session.run("python", "-m", "pytest", "tests/look/test_others.py", env=env_of("signs"))
    session.run("python", "-m", "benchmarks", "generated", "--page", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(python="3.11", reuse_venv=True, default=False)
def trackers(session: nox.Session) -> None:
    """What Trackio, MLflow, wandb and TensorBoard write is read while they write, after a kill and without its end."""
    own = "torch==2.13.0", "-e", ".[testing,report,tensorboard]"
    session.install(*own, "hypothesis>=6.120", "trackio==0.43.0", "mlflow==3.17.2", "wandb==0.31.0")
    session.run(
        "python", "-m", "pytest", "tests/look/test_trackers.py", "-m", "slow", *session.posargs, env=env_of("trackers")
    )


@nox.session(python="3.11", reuse_venv=True, default=False)
def verl(session: nox.Session) -> None:
    """The tests of the adapter for verl, whose pins exclude those of TRL; elsewhere they are skipped."""
    session.install("-c", "constraints-verl.txt", "torch==2.13.0", "hypothesis>=6.120", "-e", ".[train,testing,verl]")
    env = {"OMP_NUM_THREADS": "1", "RLSTAB_REQUIRE_VERL": "1"}
    session.run("rlstab", "doctor", env=env)
    session.run(
        "python", "-m", "pytest", "tests/adapters", "tests/replay/test_verl.py", LOSSES, *session.posargs, env=env
    )


@nox.session(python="3.12", reuse_venv=True, default=False)
def skyrl(session: nox.Session) -> None:
    """The tests of the adapter for SkyRL, whose worker and trainer run on a CPU, and its losses held to the cut."""
    # what its trainer imports
    more = "aiohttp", "orjson", "pybase64", "fastapi", "uvicorn", "torchdata", "hypothesis>=6.120"
    session.install("torch==2.13.0", "-e", ".[train,testing,skyrl]", *more)
    env = env_of("skyrl")
    session.run("python", "-m", "pytest", "tests/adapters/test_skyrl.py", LOSSES, *session.posargs, env=env)


@nox.session(python="3.12", reuse_venv=True, default=False)
def tinker(session: nox.Session) -> None:
    """The tests of the adapter for Tinker with a server of SkyRL on a CPU, which the tests start and end."""
    session.install(
        "torch==2.13.0", "-e", ".[train,testing]", "skyrl[tinker,jax]==0.4.0", "aiohttp", "uv", "hypothesis>=6.120"
    )
    files = "tests/adapters/test_tinker.py", "tests/adapters/test_tinker_server.py"
    still_open = "-W", "ignore::ResourceWarning"  # the SDK ends with its process, and so do its connections
    session.run("python", "-m", "pytest", *still_open, *files, *session.posargs, env=env_of("tinker"))
    # the SDK's newest tested release, whose server is Tinker's own: what it would send
    session.install("tinker==0.38.0")
    session.run("python", "-m", "pytest", files[1], "-k", "sdk", *session.posargs, env=env_of("tinker"))


@nox.session(python="3.12", reuse_venv=True, default=False)
def axolotl(session: nox.Session) -> None:
    """The tests of the adapter for axolotl, by its own command on a CPU."""
    session.install("torch==2.13.0", "-e", ".[train,testing,axolotl]", "hypothesis>=6.120")
    session.run("rlstab", "doctor", env=env_of("axolotl"))
    session.run("python", "-m", "pytest", "tests/adapters/test_axolotl.py", *session.posargs, env=env_of("axolotl"))


@nox.session(python="3.11", reuse_venv=True, default=False)
def prime_rl(session: nox.Session) -> None:
    """The tests of the adapter for prime-rl by its own loss module: ``nox -s prime_rl -- FOLDER``, a checkout of it.

    Its other packages, which need a GPU, are not installed.
    """
    if not session.posargs:
        session.error("give the path of a checkout of prime-rl: nox -s prime_rl -- FOLDER")
    source = Path(session.posargs[0]).absolute()
    own = "beartype", "jaxtyping", "prime-pydantic-config", "wandb", "hypothesis>=6.120"
    session.install("torch==2.13.0", "-e", ".[testing]", *own)
    paths = os.pathsep.join(str(source / folder) for folder in ("src", "packages/prime-rl-configs/src"))
    env = {**env_of("prime_rl"), "PYTHONPATH": paths}
    session.run("python", "-m", "pytest", "tests/adapters/test_prime_rl.py", *session.posargs[1:], env=env)


@nox.session(python="3.11", reuse_venv=True, default=False)
def openrlhf(session: nox.Session) -> None:
    """OpenRLHF's policy losses held to the cut; without its dependencies, which need a GPU."""
    session.install("torch==2.13.0", "-e", ".[testing]")
    session.install("--no-deps", "openrlhf==0.11.2")
    session.run("python", "-m", "pytest", LOSSES, *session.posargs, env=env_of("openrlhf"))


@nox.session(reuse_venv=True, default=False)
@nox.parametrize(
    "python,host",
    [("3.11", "trl==1.16.0"), ("3.11", "trl==1.9.0"), ("3.11", "verl==0.9.1"), ("3.12", "skyrl==0.4.0")],
    ids=["trl", "trl-1.9", "verl", "skyrl"],
)
def atlas(session: nox.Session, host: str) -> None:
    """The errors of docs/atlas.md, measured in the releases that have them."""
    name = host.partition("==")[0]
    others = {
        "trl": ["-c", "constraints.txt", "-e", ".[train,tasks,lora,testing]", "datasets"],
        "verl": ["-c", "constraints-verl.txt", "-e", ".[train,testing,verl]"],
        "skyrl": ["-e", ".[testing]", "ray", "jaxtyping", "loguru", "omegaconf"],
    }[name]
    session.install("torch==2.13.0", "hypothesis>=6.120", host, *others)
    session.run("python", "-m", "pytest", "tests/atlas", "-m", "slow", *session.posargs, env=env_of(name))


def env_of(host: str) -> dict[str, str]:
    """Of the tests that need a host: where it is missing, they fail."""
    # hosts bring anyio, whose plugin for pytest warns of the newest pytest
    return {"OMP_NUM_THREADS": "1", f"RLSTAB_REQUIRE_{host.upper()}": "1", "PYTEST_ADDOPTS": "-p no:anyio"}


def bound(session: nox.Session, resolution: str) -> None:
    """The tests with the oldest or the newest releases of everything but torch that pyproject.toml allows."""
    found = Path(session.create_tmp()) / f"{resolution}.txt"
    session.install("uv>=0.5", "torch==2.13.0")
    resolve = "uv", "pip", "compile", "--quiet", "--extra", "dev", "--resolution", resolution, "--no-annotate"
    session.run(*resolve, "--python", "3.11", "--upgrade", "pyproject.toml", "--output-file", str(found))
    with_torch = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")  # torch comes from where pip finds it
    pins = [line for line in found.read_text(encoding="utf-8").splitlines() if not with_torch.match(line)]
    found.write_text("\n".join([*pins, "torch==2.13.0"]), encoding="utf-8")
    session.install("-r", str(found))
    session.install("--no-deps", "-e", ".")
    session.run("python", "-m", "pytest", "-n", "auto", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(python="3.11", default=False)
def trl_newest(session: nox.Session) -> None:
    """The tests of the adapter for TRL with TRL's newest release, which the adapter may not know."""
    session.install("torch==2.13.0", "hypothesis>=6.120", "-e", ".[train,tasks,lora,testing]", "trl")
    drift(session, "TRL")


@nox.session(python="3.11", default=False)
def verl_newest(session: nox.Session) -> None:
    """The tests of the adapter for verl with verl's newest release, likewise."""
    session.install("torch==2.13.0", "hypothesis>=6.120", "-e", ".[train,testing]")
    session.install("verl", "TransferQueue", "cachetools", "fastapi", "uvicorn")
    drift(session, "VERL")


def drift(session: nox.Session, host: str) -> None:
    """Say what the adapter makes of an installed host, and run its tests."""
    env = {"OMP_NUM_THREADS": "1", f"RLSTAB_REQUIRE_{host}": "1"}
    session.run("rlstab", "doctor", env=env, success_codes=[0, 1])
    session.run("python", "-m", "pytest", "tests/adapters", *session.posargs, env=env)


@nox.session(python="3.11", reuse_venv=True, default=False)
def lowest(session: nox.Session) -> None:
    """The tests at the lower bounds of pyproject.toml."""
    bound(session, "lowest-direct")


@nox.session(python="3.11", reuse_venv=True, default=False)
def newest(session: nox.Session) -> None:
    """The tests with the newest releases; a failure says what to change before users meet it."""
    bound(session, "highest")


for chosen in dict.fromkeys(row[:2] for row in MATRIX):
    install(*chosen)
for chosen in MATRIX:
    test(*chosen)
