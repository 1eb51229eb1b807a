"""TRL's own tests of its GRPO trainer, by that trainer and by the adapter's: ``nox -s trl_own -- FOLDER``.

FOLDER is a copy of TRL's repository, or of its ``tests``; rlstab has none. The tests read models and data sets from the
hub. ``--stand-ins`` makes tiny random models of the same names instead, for a machine without a network: what needs
others fails with both trainers.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, deque
from pathlib import Path

from tests.adapters.jobs import ROOT

FILES = ("__init__.py", "conftest.py", "testing_utils.py", "testing_constants.py", "test_grpo_trainer.py")
IMPORT = "from trl import GRPOConfig, GRPOTrainer\n"
OURS = "from trl import GRPOConfig\nfrom rlstab.adapters.trl import RLStabGRPOTrainer as GRPOTrainer\n"
#: A line of ``pytest -v`` about a test that finished.
FINISHED = re.compile(r"^\S+?::(\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
#: How tests that pass with TRL's trainer may end with the adapter's, by a part of their names, each with the reason.
EXPECTED = {"[cispo": "an epsilon_high below 1 is refused"}


def outcomes(tests: Path, ours: bool, limit: int, more: list[str]) -> dict[str, str]:
    """How each test ended, by its name; names are printed as the tests finish."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "trl_tests"
        shutil.copytree(tests, package, ignore=lambda _, names: [name for name in names if name.startswith("test_")])
        for name in FILES:
            shutil.copy(tests / name, package)
        changed = package / FILES[-1]
        text = changed.read_text(encoding="utf-8")
        if IMPORT not in text:
            raise SystemExit(f"{changed.name} does not begin with '{IMPORT.strip()}'. Look at what it imports now.")
        changed.write_text(text.replace(IMPORT, OURS) if ours else text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--timeout={limit}", str(changed)]
        path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        ended: dict[str, str] = {}
        last: deque[str] = deque(maxlen=20)
        with subprocess.Popen(
            [*command, *more], cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last.append(line)
                found = FINISHED.match(line)
                if found:
                    ended[found[1]] = found[2]
                    print(f"{'adapter' if ours else 'TRL':8} {found[2]:8} {found[1]}", flush=True)
        if process.returncode not in (0, 1):
            print(f"pytest ended with code {process.returncode}: not every test was tried\n{''.join(last)}", flush=True)
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="TRL's repository, or its tests")
    parser.add_argument("--limit", type=int, default=120, help="seconds for each test")
    parser.add_argument("--stand-ins", action="store_true", help="random models instead of those of the hub")
    options, more = parser.parse_known_args()
    tests = options.folder / "tests" if (options.folder / "tests").is_dir() else options.folder
    missing = [name for name in FILES if not (tests / name).is_file()]
    if missing:
        raise SystemExit(f"{tests} has no {missing[0]}. Give the path of a copy of TRL's repository, or of its tests.")
    with tempfile.TemporaryDirectory() as hub:
        if options.stand_ins:
            from tests.adapters import trl_hub

            trl_hub.make(Path(hub))
            os.environ.update(HF_HUB_CACHE=hub, HF_HUB_OFFLINE="1")
            more += ["-p", trl_hub.__name__]
        theirs, ours = (outcomes(tests, adapter, options.limit, more) for adapter in (False, True))
    worse = []
    print(f"\n{'TRL':8} {'adapter':8} where they differ")
    for name in sorted({*theirs, *ours}):
        pair = theirs.get(name, "-"), ours.get(name, "-")
        reason = next((why for part, why in EXPECTED.items() if part in name), "")
        if pair[0] != pair[1]:
            print(f"{pair[0]:8} {pair[1]:8} {name}{f' ({reason})' if reason else ''}")
        worse += [name] if pair[0] == "PASSED" != pair[1] and not reason else []
    for who, ended in (("TRL", theirs), ("adapter", ours)):
        print(f"{who}: {', '.join(f'{count} {outcome}' for outcome, count in Counter(ended.values()).most_common())}")
    return 1 if worse or not theirs else 0


if __name__ == "__main__":
    sys.exit(main())
