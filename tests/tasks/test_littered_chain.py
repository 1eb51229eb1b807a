"""The littered chain: junk that the reader stumbles over or needs, remainders, and the chain as it was before."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import example as also
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.demonstrations import of_chain
from examples.junk_share import junk_share
from rlstab.errors import OutOfRange
from rlstab.tasks import JUNK, Chain, Example
from rlstab.tasks.chain import Sum

LITTERED = {"terms": 5, "largest": 2, "modulus": 10, "junk_symbols": 1000}
EIGHT = Example("Q9+1-2=", Sum((9, 1, -2)))


def littered(task: Chain, index: int, **noise: float) -> tuple[Example, str]:
    example = task.example("train", index)
    return example, of_chain(task, example, random.Random(index), **noise)


def test_without_its_settings_the_chain_is_what_it_was() -> None:
    """What `chain-tiny` learnt from; the checksum is from before there were these settings."""
    seen = hashlib.sha256()
    for index in range(2000):
        example = Chain().example("train", index)
        noise = random.Random(f"demonstration 0 {index}")
        seen.update((example.prompt + of_chain(Chain(), example, noise)).encode())
    assert seen.hexdigest() == "b33ce229272ab73a420b3d441d110155b31ee78d3a85c4552b3999fb367ce17a"
    assert Chain().junk == JUNK


def test_remainders_are_what_is_written() -> None:
    task = Chain(terms=3, modulus=10)
    assert of_chain(task, EIGHT, random.Random(0), wrong=0.0, commuted=0.0, junk=0.0) == "9+1=0;0-2=8;A8$"
    below = Example("Q1-2=", Sum((1, -2)))
    assert [task.score(below, text) for text in ("A9$", "A-1$", "A19$")] == [1.0, 0.0, 0.0]
    example = Example("Q9-2=", Sum((9, -2)))
    off = [of_chain(Chain(modulus=4), example, random.Random(n), wrong=1.0, junk=0.0) for n in range(30)]
    assert {text[-2] for text in off} == {"0", "1", "2"}  # never the 3 that is right


@settings(max_examples=40, deadline=None)
@given(
    index=st.integers(0, 10**6),
    terms=st.integers(2, 6),
    largest=st.integers(1, 9),
    modulus=st.none() | st.integers(2, 10),
    symbols=st.integers(1, 4096),
    commuted=st.sampled_from((0.0, 1.0)),
)
@also(index=0, terms=2, largest=1, modulus=2, symbols=1, commuted=1.0)  # the fewest problems that there can be
def test_demonstrations_without_mistakes_are_right(
    index: int, terms: int, largest: int, modulus: int | None, symbols: int, commuted: float
) -> None:
    task = Chain(terms=terms, largest=largest, modulus=modulus, junk_symbols=symbols)
    for split in ("train", "eval"):
        example = task.example(split, index)
        assert all(abs(term) <= largest for term in example.answer.terms[1:])
        text = of_chain(task, example, random.Random(index), wrong=0.0, commuted=commuted, junk=0.2 / symbols)
        assert task.score(example, text) == 1.0
        assert [(one.reward, one.outcome) for one in task.blocks(example, text)] == [(1.0, 1)] * terms
        number = text.rpartition("A")[2].translate(str.maketrans("", "", f"{task.junk}$"))
        assert modulus is None or 0 <= int(number) < modulus
        without = Chain(terms=terms, largest=largest, modulus=modulus, junk_symbols=symbols, needs_junk=True)
        assert without.score(example, text) == any(one in task.junk for one in text)


def test_junk_is_as_much_as_it_says_and_of_every_kind() -> None:
    task = Chain(**LITTERED)
    assert len(set(task.junk)) == 1000
    answers = [littered(task, index, junk=0.0001) for index in range(3000)]
    junk = [one for _, text in answers for one in text if one in task.junk]
    characters = sum(len(text) - 1 for _, text in answers)
    # a tenth, to five standard errors of some 90 000 characters
    assert len(junk) / characters == pytest.approx(0.1, abs=0.005)
    assert len(set(junk)) > 990
    share = sum(junk_share(example.prompt, text, example.answer) * (len(text) - 1) for example, text in answers)
    assert share == pytest.approx(len(junk))
    assert (junk_share("", "", None), junk_share("", "$#", None)) == (0.0, 0.0)


def test_the_reader_stumbles_over_the_share_of_places_and_symbols_that_it_says() -> None:
    example = Example("Q1+1=", Sum((1, 1)))
    readers = {share: Chain(junk_symbols=1000, fragile=share) for share in (0.05, 0.5)}
    texts = [f"{'9' * place}{symbol};A2$" for place in range(20) for symbol in readers[0.5].junk[::10]]
    whole = {share: [reader.score(example, one) for one in texts] for share, reader in readers.items()}
    for share, scores in whole.items():  # five standard errors of 2000
        assert 1 - sum(scores) / len(scores) == pytest.approx(share, abs=5 * (share * (1 - share) / len(scores)) ** 0.5)
    # more fragile is never easier, and it is the problem that decides beside place and symbol
    assert all(one >= other for one, other in zip(whole[0.05], whole[0.5], strict=True))
    elsewhere = Example("Q2+0=", Sum((2, 0)))
    assert whole[0.5] != [readers[0.5].score(elsewhere, one) for one in texts]
    assert {Chain(fragile=1.0).score(example, text) for text in ("A#2$", "#A2$")} == {0.0}
    assert {Chain(fragile=1.0).score(example, text) for text in ("A2$", "A2$#", "1+1=2;A2$")} == {1.0}


@settings(max_examples=40, deadline=None)
@given(index=st.integers(0, 10**6), fragile=st.sampled_from((0.0, 0.05, 0.3)), needs_junk=st.booleans())
def test_an_answer_whose_last_block_has_outcome_one_scores_one(index: int, fragile: float, needs_junk: bool) -> None:
    task = Chain(**LITTERED, fragile=fragile, needs_junk=needs_junk)
    example, text = littered(task, index, wrong=0.1, junk=0.0001)
    last = task.blocks(example, text)[-1]
    assert task.score(example, text) >= last.outcome
    one_before = "" if ";" not in text else text.rpartition(";")[0]
    assert (last.outcome == 1) <= (not needs_junk or any(one in task.junk for one in one_before + text))


@settings(max_examples=40, deadline=None)
@given(text=st.text() | st.text(alphabet="A0123456789+-=;$#丁"))
@also(text="A8#$\ud800")
def test_any_text_has_a_score_and_blocks(text: str) -> None:
    task = Chain(**LITTERED, fragile=0.5, needs_junk=True)
    assert task.score(EIGHT, text) in (0.0, 1.0)
    assert sum(one.stop - one.start for one in task.blocks(EIGHT, text)) == len("".join(text.partition("$")[:2]))


def test_settings_out_of_range() -> None:
    for name, value in [
        ("terms", 7), ("largest", 0), ("modulus", 1), ("modulus", 11), ("junk_symbols", 0), ("junk_symbols", 4097),
        ("fragile", 1.5), ("fragile", float("nan")), ("flaky", -0.1), ("flaky", 1.0),
    ]:  # fmt: skip
        with pytest.raises(OutOfRange, match=f"`{name}`"):
            Chain(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(OutOfRange, match="junk"):
        of_chain(Chain(junk_symbols=1000), EIGHT, random.Random(0), junk=0.001)
