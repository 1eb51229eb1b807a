"""`make check-wheel`: build what would be uploaded, check it, and use the wheel far from the clone.

`make release` also keeps what was built, in dist/, and says what a person then does.

The wheel is built from the sdist, so that a file that the sdist lacks is missed here. It is installed into a folder
that comes before the clone on the path of the environment that runs this, which has all that it needs: no network.
tests/slow/test_release.py has the same in empty environments, with everything installed by pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import project_url

ROOT = Path(__file__).parents[1]
#: What is expected in the sdist, apart from the package.
IN_SDIST = {
    "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "constraints.txt",
    "pyproject.toml", "examples/countdown.yaml", "tests/conftest.py",
}  # fmt: skip
#: Data files, whose absence no import would show.
IN_WHEEL = {
    "rlstab/py.typed", "rlstab/data/countdown-tiny/model.safetensors", "rlstab/data/examples/countdown.yaml",
    "rlstab/hosts.yaml", "rlstab/look/look.html", "rlstab/look/look.js", "rlstab/look/look.css",
    "rlstab/page/frame.html", "rlstab/page/page.css", "rlstab/presets/presets.yaml", "rlstab/report/page.html",
}  # fmt: skip
WHERE = """
import importlib.metadata, pathlib, sys, rlstab
assert pathlib.Path(rlstab.__file__).is_relative_to(sys.argv[1]), rlstab.__file__
assert importlib.metadata.version("rlstab") == rlstab.__version__
"""
SHORT = [
    "rollout.prompts=4", "rollout.group=4", "optimisation.rollouts=2", "optimisation.mini_batches=1",
    "evaluation.every=0", "tracking.dump_every=1",
]  # fmt: skip


def main(keep: Path | None = None) -> None:
    """Build, check and use sdist and wheel, and copy them to the folder ``keep``; exit with what is wrong."""
    if keep is not None:
        project_url.require()
    with tempfile.TemporaryDirectory() as folder:
        dist, site, empty = (Path(folder, name) for name in ("dist", "site", "empty"))
        empty.mkdir()
        python = sys.executable
        run(python, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT))
        (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
        run(python, "-m", "twine", "check", "--strict", str(sdist), str(wheel))
        run(python, "-m", "check_wheel_contents", "--config", str(ROOT / "pyproject.toml"), str(wheel))
        with tarfile.open(sdist) as archive:
            require(sdist, IN_SDIST - {name.partition("/")[2] for name in archive.getnames()})
        with zipfile.ZipFile(wheel) as archive:
            require(wheel, IN_WHEEL - set(archive.namelist()))
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel))
        path = {"PYTHONPATH": str(site)}
        run(python, "-c", WHERE, str(site), cwd=empty, **path)
        for command in (
            ["--version"],
            ["check", "--example", "countdown"],
            ["train", "--example", "countdown", *(f"--set={setting}" for setting in SHORT)],
            ["look", "runs/countdown"],
        ):
            run(python, "-m", "rlstab", *command, cwd=empty, **path)
        print(f"{sdist.name} ({sdist.stat().st_size:,} bytes), {wheel.name} ({wheel.stat().st_size:,} bytes): good")
        if keep is not None:
            keep.mkdir(exist_ok=True)
            copies = [shutil.copy2(file, keep) for file in (sdist, wheel)]
            version = sdist.name.removeprefix("rlstab-").removesuffix(".tar.gz")
            print(f"Now, by hand: date the section {version} of CHANGELOG.md, and tag the commit: git tag v{version}")
            print(f"Then upload: {sys.executable} -m twine upload {' '.join(map(str, copies))}")


def run(*command: str, cwd: Path = ROOT, **environment: str) -> None:
    """Run a command; exit with its output if it fails."""
    process = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{process.stdout}")


def require(archive: Path, missing: set[str]) -> None:
    """Exit if an archive lacks a file."""
    if missing:
        sys.exit(f"{archive.name} lacks {', '.join(sorted(missing))}. See [tool.hatch.build] in pyproject.toml.")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
