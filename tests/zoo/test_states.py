"""Methods follow their state over ten optimizer steps, each cut in another way, as the oracles do.

Over two processes, the same is in tests/testing/test_processes.py, which starts them.
"""

from typing import Any

import pytest
import torch

from rlstab import PolicyOutputs, make_plan
from rlstab.core.comm import Comm, LocalComm
from tests.core.steps import LIVE, batch_of, number, random_rows
from tests.oracles import outcome
from tests.processes import Processes
from tests.zoo.test_oracles import CASES, REORDERED, WITH_STATE, agree, made

#: The mean entropy of each optimizer step, on both sides of every target; None is a step without tokens.
LEVELS = (0.0, 0.25, 9.0, None, 0.0, 0.0, 9.0, 0.25, 0.0, 0.0)
#: Parts of two ranks, in turn.
CUTS = (([[0, 3]], [[1], [2]]), ([[2], [3, 1, 0]], []), ([], [[0, 1, 2, 3]]), ([[3]], [[1, 2], [0]]))
#: The first and the last settings of each method with a state, and those beside other methods.
METHODS = [case.values[0] for case in CASES if case.values[0].keys() & WITH_STATE and not case.marks]


def learn(methods: Any, rows: Any, parts: Any, state: Any, comm: Comm) -> tuple[float, dict[int, Any], Any]:
    """An optimizer step on the parts of one rank: their loss, the slopes of each row by output, and the next state."""
    objective = made(tuple((name, tuple(settings.items())) for name, settings in methods.items()))
    pieces = [[rows[row] for row in part] for part in parts]
    plan = make_plan(objective, [batch_of(*each) for each in zip(pieces, parts, strict=True)], state, comm)
    loss, slopes = 0.0, dict[int, Any]()
    for index, part in enumerate(parts):
        tokens = number(pieces[index])
        leaves = {
            name: torch.tensor([token[field] for token in tokens], dtype=torch.float64, requires_grad=True)
            for name, field in LIVE.items()
        }
        out = plan.loss(index, PolicyOutputs(**leaves))
        loss += out.loss.item()
        if out.loss.requires_grad:
            out.loss.backward()
        for name, leaf in leaves.items():
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for row, own in zip(part, grad.split([len(rows[row]) for row in part]), strict=True):
                slopes.setdefault(row, {})[LIVE[name]] = own.tolist()
    return loss, slopes, plan.state


def follow(methods: Any, processes: Processes | None) -> None:
    """Ten optimizer steps of the library and of the oracles, each with the state and the memories of its own."""
    memories: Any = None
    state: Any = None
    for index, level in enumerate(LEVELS):
        lengths = [0] * 4 if level is None else [5, 0, 3, 2]
        rows = [[{**own, "H": level} for own in row] for row in random_rows(index, lengths)]
        tokens, ranks = number(rows), CUTS[index % len(CUTS)]
        expected, _, memories = outcome(tokens, methods, memories)
        if processes is None:
            answers = [learn(methods, rows, [part for parts in ranks for part in parts], state, LocalComm())]
        else:
            answers = processes.each(learn, [(methods, rows, parts, state) for parts in ranks])
        assert agree(sum(loss for loss, _, _ in answers), expected.loss), index
        for row in range(len(rows)):
            mine = [slopes for token, slopes in zip(tokens, expected.slopes, strict=True) if token["row"] == row]
            (given,) = [slopes[row] for _, slopes, _ in answers if row in slopes]
            for field, values in given.items():
                wanted = [own[field] for own in mine]
                assert all(agree(*pair) for pair in zip(values, wanted, strict=True)), (index, row, field)
        states = [after for _, _, after in answers]
        for after in states:
            assert after == states[0]
            for name, memory in memories.items():
                assert after[name] == pytest.approx(memory or {}, rel=REORDERED), (index, name)
        state = states[0]


@pytest.mark.parametrize("methods", METHODS, ids=lambda methods: " ".join(methods))
def test_ten_steps_that_are_cut_in_turn_equal_the_oracle(methods: Any) -> None:
    follow(methods, None)
