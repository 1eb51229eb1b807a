"""Prompts that are neither too easy nor too hard, by a teacher that reads them (Goldilocks)."""

from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlstab import Mean, Range, Settled, Stat, State
from rlstab.stages import pass_rates
from rlstab.stages.half_sigmoid import HalfSigmoid
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.slots import DECIMALS, at_random, pool_of, shuffled
from rlstab.stages.stage import Offer, PromptSelector


class GoldilocksTeacher(PromptSelector):
    """Take the prompts whose rewards a teacher predicts will vary most between responses.

    Problem:
        A prompt that the policy always solves, or never solves, gives a group of equal rewards: no advantage and no
        gradient, at the full cost of sampling. The gradient of a prompt with pass rate p is proportional to sqrt(p (1 -
        p)), the standard deviation of its reward. In a large data set prompts hardly ever recur, so what is known about
        one has to generalise to others: a teacher reads the prompt and predicts it.

    Equation:
        With e(q) the mean of the policy's input embeddings over the tokens of the prompt q, and ``raw_rewards`` r in
        [0, 1] of the responses to q in a rollout:

            y_q  = sqrt(p (1 - p)),  p = mean of r                       what the prompt was worth
            f(q) = 0.5 sigmoid(w . e(q))                                 what the teacher expects
            w    = argmin sum over the window of (f(q) - y_q)^2 + rho |w|^2

        A slot of the rollout is dealt K = ``candidates`` random prompts, and takes the one of the largest f, or, with
        probability epsilon = ``random_share``, the first of them. rho is ``ridge``; the window holds the ``window``
        newest (q, y_q). Features are centred and scaled over the window, and a constant is one more. The teacher is
        fitted anew before each rollout, by damped Gauss-Newton steps from w = 0: a selection is a function of the
        window and of the policy.

    Reads:
        - ``raw_rewards`` (S,), of the scorer: outside of [0, 1] they count as 0 or 1.
        - ``prompt_ids`` (S,): several groups of one prompt in a rollout make one p.
        - ``given`` (S,): branches are not counted, because they begin with part of a chosen answer.
        - ``prompt_features`` of the offer (n, width): e(q), of the policy as it is when prompts are selected.

    Returns:
        The numbers of the prompts. From a pool, different ones within a rollout, refills included, until it has taken
        all: candidates are dealt from the shuffled pool, and the ones that are left are shuffled and dealt again when
        it ends. If prompts are unlimited, each slot is dealt the next K prompts, and none comes twice in a run.

    Parameters:
        - ``pool``: int in [1, inf) or None, default None. Prompts 0 to pool - 1 of the task are used; None takes all
          prompts of the task, whose number may be unlimited.
        - ``candidates`` (K): int in [1, inf), default 8. How many prompts a slot chooses from. Chosen here: the paper's
          value was not found.
        - ``random_share`` (epsilon): float in [0, 1], default 0.1. Chosen here: the paper's value was not found.
        - ``window``: int in [1, inf), default 512. How many of the newest prompts the teacher learns from; it should
          hold several rollouts. Chosen here: the paper's value was not found.
        - ``ridge`` (rho): float in (0, inf), default 0.001. Chosen here: on Countdown, 1e-5 to 1e-2
          select about equally well.

    State:
        - ``prompts`` (window,), int64, and ``worth`` (window,), float64: the window, oldest first; of one rollout in
          the order of the prompts.
        - ``filled``, int: how many of its rows hold something.

    Deviations:
        - From the paper: its teacher is a separate language model with a linear head on mean-pooled states, trained as
          a whole on separate GPUs. Here the features are the policy's input embeddings, and only w is fitted.
        - From the paper: it trains by stochastic gradient on the squared error. Here the same error is minimised over
          the whole window, with a ridge, because a window can have fewer rows than features.
        - From the paper: no prompt comes twice in a rollout. What the paper does about it was not found.
        - From its code: no official code was found.

    Interacts:
        - with ``dynamic_sampling``: both avoid groups of equal rewards, this one before they are sampled. Refills come
          from new candidates, and dropped groups train the teacher.
        - with ``overlong`` and other reward shapers: they have no effect here, because ``raw_rewards`` decide what was
          solved.
        - with metrics of the reward: ``reward/mean`` is that of the selected prompts, near 1/2 by design. Compare runs
          by an evaluation.

    Limits:
        - ``candidates: 1`` leaves nothing to choose: it is ``uniform`` with the same pool, bit for bit, and
          ``in_order`` on a task with unlimited prompts.
        - ``random_share: 1.0`` takes the first candidate of each slot, whatever the teacher expects.
        - So does every slot as long as the window is empty, or prompts have no features that differ.

    Example:
        Prompts whose single feature is their own number. Those above 0 were worth 0.5 and the others nothing, so of two
        candidates the teacher prefers the larger. Of four prompts, dealt in pairs, one is then always 2 or 3.

        >>> import torch
        >>> from rlstab.stages.goldilocks_teacher import GoldilocksTeacher
        >>> from rlstab.stages.stage import Offer
        >>> teacher = GoldilocksTeacher(pool=4, candidates=2, random_share=0.0, window=3)
        >>> state = {"prompts": torch.tensor([0, 1, 2]), "worth": torch.tensor([0.0, 0.5, 0.5]).double(), "filled": 3}
        >>> offer = Offer(1, 0, 2, 2, None, 0, features=lambda prompts: prompts.double().unsqueeze(1))
        >>> max(teacher.select(offer, state).tolist())
        3

    Source:
        I. Mahrooghi, A. Lotfi, E. Abbe, "Goldilocks RL: Tuning Task Difficulty to Escape Sparse Rewards for Reasoning",
        2026, arXiv 2602.14868. Reference code: none found.
    """

    name = "goldilocks_teacher"
    needs = pass_rates.NEEDS | {"prompt_features"}

    pool: Annotated[int | None, Range(ge=1)] = None
    candidates: Annotated[int, Range(ge=1)] = 8
    random_share: Annotated[float, Range(ge=0, le=1)] = 0.1
    window: Annotated[int, Range(ge=1)] = 512
    ridge: Annotated[float, Range(gt=0)] = 0.001

    def init_state(self) -> State:
        return {
            "prompts": torch.zeros(self.window, dtype=torch.int64),
            "worth": torch.zeros(self.window, dtype=torch.float64),
            "filled": 0,
        }

    def select(self, offer: Offer, state: State) -> Tensor:
        if self.pool is None and offer.size is None:
            hands = torch.arange(offer.drawn, offer.drawn + offer.count).unsqueeze(1) * self.candidates
            hands = hands + torch.arange(self.candidates)
            best = self._expected(hands.reshape(-1), offer, state).view(hands.shape).argmax(1)
            dice = torch.tensor(at_random(offer, self.random_share)[offer.first :])
            return hands.gather(1, torch.where(dice, 0, best).unsqueeze(1)).squeeze(1)
        dealer = _Dealer(offer, pool_of(self.name, self.pool, offer), self.candidates)
        worth = dict(zip(dealer.may_deal.tolist(), self._expected(dealer.may_deal, offer, state).tolist(), strict=True))
        chosen = []
        for random in at_random(offer, self.random_share):
            hand = dealer.hand()
            chosen.append(hand[0] if random else max(hand, key=worth.__getitem__))  # the first of equal ones
            dealer.taken.add(chosen[-1])
        return torch.tensor(chosen[offer.first :], dtype=torch.int64)

    def measure(self, part: ResponseBatch) -> Stat:
        return {"seen": pass_rates.observed(part)}

    def advance(self, state: State, stat: Settled) -> State:
        answered, old = stat.grouped("seen"), state["filled"]
        prompts = torch.cat([state["prompts"][:old], answered.keys])[-self.window :]
        worth = torch.cat([state["worth"][:old], pass_rates.spread(answered.totals / answered.counts)])[-self.window :]
        rest = (0, self.window - len(prompts))
        return {"prompts": pad(prompts, rest), "worth": pad(worth, rest), "filled": len(prompts)}

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        return {"window": Mean.scalar(float(state["filled"]))}

    def _expected(self, prompts: Tensor, offer: Offer, state: State) -> Tensor:
        """``(n,)`` the teacher's predictions for ``(n,)`` prompts; 0 before it has learnt anything."""
        filled = state["filled"]
        if not filled or self.candidates == 1:
            return torch.zeros(len(prompts), dtype=torch.float64)
        different, index = torch.cat([state["prompts"][:filled], prompts]).unique(return_inverse=True)
        features = offer.features(different).double()[index]
        teacher = HalfSigmoid.fit(features[:filled], state["worth"][:filled], self.ridge)
        return teacher(features[filled:]).round(decimals=DECIMALS)


class _Dealer:
    """Deals candidates from the shuffled pool; those that are not taken are shuffled and dealt again.

    Attributes:
        taken: prompts that slots took; emptied once it is the whole pool.
        may_deal: ``(n,)`` int64, all prompts that may be dealt for this offer.
    """

    def __init__(self, offer: Offer, pool: int, candidates: int) -> None:
        self.taken: set[int] = set()
        self._offer, self._pool, self._candidates = offer, pool, candidates
        self._turns = count(1)
        first = shuffled(offer, pool)
        self._deck: Iterator[int] = iter(first.tolist())
        self.may_deal = first[: (offer.first + offer.count) * candidates]

    def hand(self) -> list[int]:
        """The next candidates, at least one; fewer than usual at the end of the pool."""
        if not (hand := list(islice(self._deck, self._candidates))):
            if len(self.taken) == self._pool:
                self.taken.clear()
            deck = shuffled(self._offer, self._pool, next(self._turns)).tolist()
            self._deck = iter([prompt for prompt in deck if prompt not in self.taken])
            hand = list(islice(self._deck, self._candidates))
        return hand
