"""Chain: answers, blocks, junk that the reader skips, stumbles over or needs, and the problems as they were before."""

import hashlib
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example as also
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.demonstrations import of_chain
from examples.junk_share import junk_share
from rlstab.errors import OutOfRange
from rlstab.tasks import JUNK, Block, Chain, Example
from rlstab.tasks.chain import Expression
from rlstab.tasks.evidence import block_evidence, token_blocks

LITTERED: dict[str, Any] = {"terms": 5, "largest": 2, "modulus": 10, "junk_symbols": 1000}
NINE, FOURTEEN = Example("Q4+7-2=", Expression((4, 7, -2))), Example("Q4+7-2+5=", Expression((4, 7, -2, 5)))


def test_problems_and_demonstrations_are_known() -> None:
    """What `chain-tiny` learnt from."""
    digest = hashlib.sha256()
    for index in range(2000):
        example = Chain().example("train", index)
        noise = random.Random(f"demonstration 0 {index}")
        digest.update((example.prompt + of_chain(Chain(), example, noise)).encode())
    assert digest.hexdigest() == "b33ce229272ab73a420b3d441d110155b31ee78d3a85c4552b3999fb367ce17a"
    assert [Chain().example("eval", index).prompt for index in range(3)] == ["Q8-9-5+4=", "Q1+1+3-1=", "Q6-5+2-8="]


def test_answers() -> None:
    for completion in [
        "4+7=11;11-2=9;9+5=14;A14$", "7+4=11;11-2=9;5+9=14;A14$", "A14$", "4+7=12;12-2=10;10+5=15;A14$",
        "4+7=11;11-2=9;9+5=14;A14$A15$", "4+7=1?1;11-2=9;9+#5=14;A1(4$", "()A~14##$",
    ]:  # fmt: skip
        assert Chain().score(FOURTEEN, completion) == 1.0, completion
    for completion in [
        "", "$", "4+7=11;11-2=9;9+5=14;A14", "$A14$", "4+7=11;11-2=9;9+5=14;14$", "A15$", "A140$", "A1$", "A15A14$",
        "AA14$", "A14;$", "A014$", "A+14$", "A-14$", "A 14$", "A14\n$", "A1_4$", "A\u0661\u0664$",
        "A" + "9" * 5000 + "$",
    ]:  # fmt: skip
        assert Chain().score(FOURTEEN, completion) == 0.0, completion
    zero = Example("Q1-1=", Expression((1, -1)))
    assert [Chain().score(zero, text) for text in ("A0$", "A-0$", "A$")] == [1.0, 0.0, 0.0]
    assert Chain().score(Example("Q1-9+3=", Expression((1, -9, 3))), "1-9=-8;-8+3=-5;A-5$") == 1.0
    below = Example("Q1-2=", Expression((1, -2)))
    assert [Chain(modulus=10).score(below, text) for text in ("A9$", "A-1$", "A19$")] == [1.0, 0.0, 0.0]


def test_blocks_by_hand() -> None:
    for completion, rewards, outcomes in [
        ("4+7=11;11-2=9;A9$", "111", "111"),
        ("7+4=11;11-2=9;A9$", "111", "111"),
        ("4+7=12;12-2=10;A10$", "011", "000"),  # what follows a mistake can be right
        ("4+7=12;11-2=9;A9$", "001", "000"),  # the right value, but not what was written before
        ("4+7=11;11-2=9;A8$", "110", "110"),
        ("A9$", "1", "1"),  # steps left out: what is left has to be in the answer
        ("4+7=11;A9$", "11", "11"),
        ("4+7=11;A11$", "10", "10"),
        ("4+7=11;11-2=9;9+1=10;A10$", "1101", "1100"),  # one step too many
        ("4+7=11;11-2", "10", "10"),  # cut off
        ("4+7=11;", "1", "1"),
        ("4+7=11;11-2=9;A9", "110", "110"),
        ("junk;A9$", "01", "00"),  # nothing that can be read: the answer goes on as after a right step
        (";$", "00", "00"),
        ("", "", ""),
        ("4(+7=1?1;11-2=9;#A9$", "111", "111"),  # junk does not count
        ("4+7=11;11-2=9;A9$;;A9$", "111", "111"),  # what follows the first $ is in no block
        ("4+7=11;-2+11=9;A9$", "101", "100"),  # a term subtracted has one order
    ]:
        blocks = Chain(terms=3).blocks(NINE, completion)
        body, end, _ = completion.partition("$")
        pieces = [f"{step};" for step in body.split(";")[:-1]] + [text for text in [body.split(";")[-1] + end] if text]
        assert [completion[block.start : block.stop] for block in blocks] == pieces
        assert "".join(str(int(block.reward)) for block in blocks) == rewards, completion
        assert "".join(str(block.outcome) for block in blocks) == outcomes, completion


def test_blocks_cover_any_text_and_an_answer_of_outcome_1_scores_1() -> None:
    for task in (Chain(terms=3), Chain(**LITTERED, fragile=0.05), Chain(**LITTERED, needs_junk=True)):
        dice, seen = random.Random(0), set()
        for index in range(400):
            example = task.example("train", index % 20)
            text = of_chain(task, example, dice, wrong=0.3, junk=0.1 / len(task.junk))
            for _ in range(dice.randint(0, 3)):  # spoil it
                place = dice.randrange(len(text) + 1)
                text = text[:place] + dice.choice("0123456789+-=;A$" + JUNK) + text[place + dice.randint(0, 1) :]
            blocks, end = task.blocks(example, text), text.find("$") + 1 or len(text)
            assert "".join(text[block.start : block.stop] for block in blocks) == text[:end]
            outcomes = [block.outcome for block in blocks]
            assert outcomes == sorted(outcomes, reverse=True)  # once wrong, always wrong
            seen.add((task.score(example, text), outcomes[-1] if text[end - 1] == "$" else 0))
        assert {(0.0, 0), (1.0, 0), (1.0, 1)} == seen, task


@settings(max_examples=40)
@given(
    index=st.integers(0, 10**6),
    commuted=st.sampled_from((0.0, 1.0)),
    chosen=st.fixed_dictionaries(
        {"terms": st.integers(2, 6), "largest": st.integers(1, 9), "modulus": st.none() | st.integers(2, 10)}
        | {"junk_symbols": st.integers(1, 4096), "seed": st.integers(0, 10**9)}
    ),
)
@also(index=0, commuted=1.0, chosen={"terms": 2, "largest": 1, "modulus": 2})  # the fewest problems possible
def test_demonstrations_without_mistakes_are_right(index: int, commuted: float, chosen: dict[str, Any]) -> None:
    task = Chain(**chosen)
    for split in ("train", "eval"):
        example = task.example(split, index)
        assert all(abs(term) <= task.largest for term in example.answer.terms[1:])
        assert eval(example.prompt[1:-1]) == sum(example.answer.terms)
        text = of_chain(task, example, random.Random(index), wrong=0.0, commuted=commuted, junk=0.2 / task.junk_symbols)
        assert task.score(example, text) == 1.0
        assert [(block.reward, block.outcome) for block in task.blocks(example, text)] == [(1.0, 1)] * task.terms
        number = text.rpartition("A")[2].translate(str.maketrans("", "", f"{task.junk}$"))
        assert task.modulus is None or 0 <= int(number) < task.modulus
        needs = Chain(**chosen, needs_junk=True)
        assert needs.score(example, text) == any(symbol in task.junk for symbol in text)


@settings(max_examples=40)
@given(text=st.text(alphabet="A0123456789+-=;$#丁é\n"), at=st.integers(0, 40), junk=st.sampled_from(JUNK))
@also(text="A8#$\ud800", at=2, junk="#")
@also(text="9" * 5000 + ";A1$", at=0, junk="#")
@also(text="\u0663+\u0664=\u0667;A7$", at=0, junk="#")
@also(text=";" * 400, at=0, junk="#")
def test_any_text_has_a_score_and_blocks_and_junk_changes_none(text: str, at: int, junk: str) -> None:
    assert Chain().score(FOURTEEN, text) == Chain().score(FOURTEEN, text[:at] + junk + text[at:])
    task = Chain(**LITTERED, fragile=0.5, needs_junk=True)
    assert task.score(NINE, text) in (0.0, 1.0)
    blocks = task.blocks(NINE, text)
    assert sum(block.stop - block.start for block in blocks) == len("".join(text.partition("$")[:2]))


def test_demonstrations_are_as_littered_as_they_say() -> None:
    seven = Example("Q9-2=", Expression((9, -2)))
    off = [of_chain(Chain(modulus=4), seven, random.Random(n), wrong=1.0, junk=0.0) for n in range(30)]
    assert {text[-2] for text in off} == {"0", "1", "2"}  # never the 3 that is right
    task = Chain(**LITTERED)
    texts = [of_chain(task, task.example("train", i), random.Random(i), junk=0.0001) for i in range(3000)]
    shares = [junk_share("", text, None) for text in texts]
    assert sum(shares) / len(shares) == pytest.approx(0.1, abs=0.005)
    assert len(set("".join(texts)) & set(task.junk)) > 990


def test_the_reader_stumbles_over_the_share_of_places_and_symbols_that_it_says() -> None:
    example, elsewhere = Example("Q1+1=", Expression((1, 1))), Example("Q2+0=", Expression((2, 0)))
    readers = {share: Chain(junk_symbols=1000, fragile=share) for share in (0.05, 0.5)}
    texts = [f"{'9' * place}{symbol};A2$" for place in range(20) for symbol in readers[0.5].junk[::10]]
    scores = {share: [reader.score(example, text) for text in texts] for share, reader in readers.items()}
    for share, each in scores.items():  # five standard errors of 2000
        assert 1 - sum(each) / len(each) == pytest.approx(share, abs=5 * (share * (1 - share) / len(each)) ** 0.5)
    # more fragile is never easier, and in addition to position and symbol the problem decides
    assert all(less >= more for less, more in zip(scores[0.05], scores[0.5], strict=True))
    assert scores[0.5] != [readers[0.5].score(elsewhere, text) for text in texts]
    assert [Chain(fragile=1.0).score(example, text) for text in ("A#2$", "#A2$", "A2$#", "1+1=2;A2$")] == [0, 0, 1, 1]


def test_settings_out_of_range() -> None:
    for name, value in [
        ("terms", 7), ("largest", 0), ("modulus", 1), ("modulus", 11), ("junk_symbols", 0), ("junk_symbols", 4097),
        ("fragile", 1.5), ("fragile", float("nan")), ("flaky", -0.1), ("flaky", 1.0),
    ]:  # fmt: skip
        with pytest.raises(OutOfRange, match=f"`{name}`"):
            Chain(**{name: value})


def test_a_token_belongs_to_the_first_block_that_has_one_of_its_characters() -> None:
    pieces = ["ab", "c;d", "\u6f22".encode()[:2], "\u6f22".encode()[2:], ";", "e", ""]  # a character cut in two; EOS

    def decode(tokens: list[int]) -> str:
        held = (pieces[token] for token in tokens)
        return b"".join(piece.encode() if isinstance(piece, str) else piece for piece in held).decode(errors="replace")

    text, tokens = decode([*range(7)]), [*range(7)]
    assert text == "abc;d\u6f22;e"
    blocks = [Block(0, 4, 1.0, 1), Block(4, 7, 0.5, 0), Block(7, 8, 0.0, 0)]
    assert token_blocks(tokens, text, blocks, decode) == [0, 0, 1, 1, 1, 2, 2]
    assert token_blocks(tokens, text, [blocks[1]], decode) == [-1, 0, 0, 0, 0, -1, -1]
    task, failed = SimpleNamespace(blocks=lambda example, completion: blocks if completion == text else []), list[str]()
    examples = [Example("", None)] * 2
    evidence = block_evidence(task, examples, [text, "ab"], [tokens, [0]], [2, 0], 5, decode, failed.append)
    assert failed == []
    assert evidence["block_ids"].tolist() == [[1, 1, 1, 2, 2], [-1] * 5]
    assert evidence["block_rewards"].tolist() == [[1.0, 0.5, 0.0], [0.0] * 3]
    assert evidence["block_outcomes"].tolist() == [[2, 1, 1], [0] * 3]
