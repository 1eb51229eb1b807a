"""A Tinker server of SkyRL on a CPU, with a small Qwen3 of random weights; it ends with the test that started it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlstab.models import SHIPPED
from tests.adapters.jobs import QUIET

BACKEND = '{"max_lora_adapters": 16, "max_lora_rank": 8, "shard_attention_heads": false}'


def save_model(folder: Path) -> None:
    """Two layers, 64 wide, with the tokens of countdown-tiny."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED["countdown-tiny"])
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=max(64, len(tokenizer)),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, str]]:
    """Its address and its model; the log is ``folder/log``."""
    save_model(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # it starts its engine by the arguments of its parent, `uv run`
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "run", "--offline", "--no-project", "--active", "-m", "skyrl.tinker.api"]
    command += ["--base-model", str(folder / "model"), "--backend", "jax", "--backend-config", BACKEND]
    command += ["--database-url", f"sqlite:///{folder}/tinker.db", "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, **QUIET, "VIRTUAL_ENV": sys.prefix, "JAX_PLATFORMS": "cpu"}
    with (folder / "log").open("w") as log:
        # a group of its own, so that the engine ends with it
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        for _ in range(1200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", str(folder / "model")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Dropping:
    """A connection to a server that breaks once: a request arrives there, and its answer is lost.

    Args:
        url: of the server.
        request: bytes of the request whose answer is lost; empty loses none.

    Attributes:
        url: for the client.
        lost: how many answers were lost.
    """

    def __init__(self, url: str, request: bytes) -> None:
        self.request, self.lost, self._lock = request, 0, threading.Lock()
        self._port = int(url.rpartition(":")[2])
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            theirs, _ = self._listening.accept()
            ours = socket.create_connection(("127.0.0.1", self._port))
            for pair in ((theirs, ours), (ours, theirs)):
                threading.Thread(target=self._pass_on, args=(*pair, pair[0] is theirs), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
                with self._lock:
                    drop = asks and bool(self.request) and self.request in data and not self.lost
                    self.lost += drop
                if drop:
                    time.sleep(0.5)  # the server has the request
                    source.shutdown(socket.SHUT_RDWR)
                    break
        except OSError:
            pass
        for end in (source, target):
            end.close()
