"""Forward and backward of a whole model under a mask that leaves a fifth of the tokens live.

    python -m benchmarks e2e --batch 4x128 --live 0.2 --against trl,trl-logits,naive --json

A Llama of 134.5M parameters with random weights (30 layers, width 576, vocabulary 49152, tied), float32. `backbone` is
the model without the head; what a case takes beyond it is its head. All parameters' gradients agree before anything is
timed.
"""

import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks.heads import HEADS, Inputs, Law, Problem, installed, weights_of
from benchmarks.protocol import SEED, Case, Run, assert_agree, interleave, listed, measured, parser

MODELS = {
    "llama-134m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 300,
    },
}
#: Relative L2 distance of all gradients, float32.
ALLOWED = 1e-5


class Model:
    """A causal language model and a batch of tokens that it learns to predict."""

    def __init__(self, name: str, rows: int, length: int, live: float) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(SEED)
        config = LlamaConfig(**MODELS[name], tie_word_embeddings=True, max_position_embeddings=2048)
        self.model: nn.Module = LlamaForCausalLM(config).eval()
        self.ids = torch.randint(config.vocab_size, (rows, length + 1))
        self.problem = Problem(rows * length, config.hidden_size, config.vocab_size, torch.float32)
        self.weights = weights_of(self.problem, live)

    def hidden(self) -> Tensor:
        """``(N, d)`` states that predict the next tokens."""
        states = self.model.model(input_ids=self.ids[:, :-1], use_cache=False).last_hidden_state
        return states.reshape(-1, states.shape[-1])

    def backbone(self) -> None:
        """Forward and backward without a head: the loss is a sum of states."""
        self.hidden().sum().backward()

    def update(self, law: Law) -> None:
        """Forward and backward with a head."""
        given = Inputs(self.hidden(), self.model.lm_head.weight, self.ids[:, 1:].reshape(-1))
        law(given, self.weights, False)[0].backward()

    def forget(self) -> None:
        """No gradients."""
        self.model.zero_grad(set_to_none=True)

    def gradients(self, law: Law) -> Tensor:
        """Of all parameters, in one vector."""
        self.forget()
        self.update(law)
        flat = torch.cat(
            [parameter.grad.reshape(-1) for parameter in self.model.parameters() if parameter.grad is not None]
        )
        self.forget()
        return flat


def assert_updates_agree(model: Model, laws: dict[str, Law]) -> dict[str, float]:
    """Relative distance of each case's gradients from the naive ones.

    Raises:
        Disagreement: above 1e-5.
    """
    reference = model.gradients(HEADS["naive"].load())
    return {
        name: assert_agree(f"{name}, all gradients", model.gradients(law), reference, allowed=ALLOWED, relative=True)
        for name, law in laws.items()
    }


def main() -> None:
    arguments = parser(__doc__, repeat=5)
    arguments.add_argument("--model", default="llama-134m", choices=sorted(MODELS))
    arguments.add_argument("--batch", default="4x128", help="responses x tokens of each (default: 4x128)")
    arguments.add_argument("--live", type=float, default=0.2)
    arguments.add_argument("--against", default="trl,trl-logits,naive")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    run = Run("e2e", options.json)
    run.say()
    rows, length = map(int, options.batch.split("x"))
    model = Model(options.model, rows, length, options.live)
    laws = installed(["rlstab", *listed(options.against)], run.console.print)
    distances = assert_updates_agree(model, laws)
    cases = {"backbone": Case(lambda _: model.backbone(), model.forget)}
    cases |= {name: Case(lambda _, law=law: model.update(law), model.forget) for name, law in laws.items()}
    times, units = interleave(cases, options.repeat)
    timed = measured(times, units)
    drawn = Table("case", title=f"{options.model}, {options.batch} tokens, {options.live:g} live, float32")
    for title in ("CPU s", "head part", "it / rlstab", "gradients differ by"):
        drawn.add_column(title, justify="right")
    for name, values in timed.items():
        part = values["cpu_s"] - timed["backbone"]["cpu_s"]
        run.add(
            name,
            model=options.model,
            shape=model.problem.shape,
            dtype="float32",
            live=options.live,
            mode="fwdbwd",
            head_s=part,
            gradients_differ=distances.get(name),
            handicap=HEADS[name].handicap if name in HEADS else "",
            **values,
        )
        drawn.add_row(
            name,
            f"{values['cpu_s']:.2f}",
            f"{part:.2f}",
            f"{1 / values['ratio_to']['rlstab']:.2f}" if name != "rlstab" else "",
            f"{distances[name]:.1e}" if name in distances else "",
        )
    run.console.print(drawn)


if __name__ == "__main__":
    main()
