"""A machine that says nothing any more: two of them, as network namespaces with a cable between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlstab.train.departures import GRACE, PROBES
from tests.train.runs import about, file_of, small
from tests.train.test_distributed import HANGS, environment, wait_for_lines

pytestmark = pytest.mark.slow

#: What the page says.
NOTICED, ENDED = 15, 30

#: $1 is a folder. When there is a file `cut` in it, the second machine loses its address, so that its kernel answers
#: nothing any more, neither data nor probes, while the cable stays up; it closes no connection.
MACHINES = """
set -e
folder=$1; shift
ip link set lo up
ip link add near type veth peer name far
RANK=1 LOCAL_RANK=0 GLOO_SOCKET_IFNAME=far unshare -n sh -c '
  until ip link show far; do sleep 0.1; done > /dev/null 2>&1
  ip link set lo up && ip addr add 10.77.0.2/24 dev far && ip link set far up && exec "$@"
' sh "$@" > "$folder/far" 2>&1 &
far=$!
until [ "$(readlink /proc/$far/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link set far netns $far
ip addr add 10.77.0.1/24 dev near && ip link set near up
RANK=0 LOCAL_RANK=0 GLOO_SOCKET_IFNAME=near "$@" > "$folder/near" 2>&1 &
near=$!
until [ -e "$folder/cut" ]; do sleep 0.05; done
nsenter --net=/proc/$far/ns/net ip addr flush dev far
date +%s.%N > "$folder/cut at"
wait $near || echo $? > "$folder/code"
date +%s.%N > "$folder/ended at"
wait $far || true
"""


def ready() -> bool:
    """This system lets its users make networks."""
    make = ["unshare", "-Urn", "ip", "link", "add", "near", "type", "veth", "peer", "name", "far"]
    try:
        return subprocess.run(make, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def number(path: Path) -> float:
    return float(path.read_text())


@pytest.mark.skipif(not ready(), reason="no network namespaces with a veth between: unshare -Urn ip link add")
def test_it_is_given_up_by_probes(tmp_path: Path) -> None:
    """The other one waits in a collective, in which it would wait for half an hour."""
    file = file_of(small(tmp_path / "run", optimisation__rollouts=100000))
    together = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    line = ["unshare", "-Urn", "bash", "-c", MACHINES, "machines", str(tmp_path)]
    with subprocess.Popen(
        [*line, sys.executable, "-m", "rlstab.cli", "train", str(file)],
        env=environment(**together),
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    ) as machines:
        try:
            wait_for_lines(tmp_path / "run", 2, lambda: machines.poll() is None)
            assert about(tmp_path / "run")["processes"] == 2
            (tmp_path / "cut").touch()
            deadline = time.monotonic() + HANGS
            while not (tmp_path / "ended at").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            os.killpg(machines.pid, signal.SIGKILL)
    said = (tmp_path / "near").read_text()
    assert "rank 1 of 2 ended without a word, as one that is killed does; rank 0 ends too" in said, said
    assert number(tmp_path / "code") == 1
    took = number(tmp_path / "ended at") - number(tmp_path / "cut at")
    print(f"ended after {took:.1f} s")
    assert NOTICED == PROBES["TCP_KEEPIDLE"] + PROBES["TCP_KEEPINTVL"] * PROBES["TCP_KEEPCNT"]
    # the last word before the cut counts as well, so that a little less than that may be left
    assert NOTICED + GRACE - 2 * PROBES["TCP_KEEPINTVL"] <= took <= ENDED
