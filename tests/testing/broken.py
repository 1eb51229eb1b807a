"""Deliberately broken methods, each with the laws that must see it and what they must say.

Each does one thing that published or careful-looking code does, and is sensible otherwise. A law that no broken method
can break would prove nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlstab.core.objective import TokenObjective
from rlstab.testing.objective_check import Oracle
from tests.testing import broken_agreement as cut
from tests.testing import broken_loss as loss
from tests.testing import broken_purity as own

#: What a law says, as a pattern.
OUTCOME = "the loss is |the gradient of "
PARTS = rf"in \d+ parts over \d ranks: ({OUTCOME})"
ANY_OF_PARTS = r"in \d+ parts over \d ranks"  # which number moves first is a matter of threads
METRIC_OF_PARTS = r"in \d+ parts over \d ranks: the metric "
STATE_OF_PARTS = r"in \d+ parts over \d ranks: state\["
REORDERED = f"in another order of tokens and sequences: ({OUTCOME})"
TWICE = f"with every sequence twice: ({OUTCOME})"
PADDING = f"with other padding: ({OUTCOME})"
ORACLE = "the loss is .* the oracle's "
SLOPE = "finite differences disagree: the gradient of the live 'logprobs'"
ELSEWHERE = "as the first that another process sees: .* Something outlives a call, or belongs to the process"
DRAWS = "it drew from the global random number generator of "
BAD_WEIGHTS = "gave [0-9]+ weights, bonuses or bounds that are NaN, infinite or negative"
#: What gives something else at every call, whatever it is called with.
EVERYWHERE = {
    "pure": "called twice with the same: the loss is ",
    "process": ELSEWHERE,
    "split": PARTS,
    "permutation": REORDERED,
    "replication": TWICE,
    "packed": PADDING,
    "order-free": "listed elsewhere in a composition: the loss is ",
    "declared": "without, and with, signals that it does not declare: the loss is ",
    "serialises": "resumed: the loss is ",
    "precision": "in float32: the loss is ",
}

#: Each broken method with exactly the laws that it breaks, and what each of them says.
BROKEN: Mapping[TokenObjective, Mapping[str, str]] = {
    # the outcome depends on the cut, the order or the padding
    cut.LocalQuantile(): {"split": PARTS},
    cut.LocalMean(): {"split": PARTS},
    cut.LocalLargest(): {"split": PARTS},
    cut.MeanOfMeans(): {"split": STATE_OF_PARTS},
    cut.CountsEmptyParts(): {"monoid": "the count of entropy, with an empty batch is "},
    cut.UnmergedMetric(): {"split": METRIC_OF_PARTS},
    cut.DroppedPerPart(): {"split": METRIC_OF_PARTS, "replication": "the metric 'forks' is "},
    cut.WhitensTheBatch(): {"split": PARTS},
    cut.KeptOfThePart(): {"split": PARTS},
    cut.AggregateOfThePart(): {"split": PARTS},
    cut.EmptyRowsCount(): {"split": PARTS},
    cut.BaselineOfThePart(): {"split": PARTS},
    cut.LastPartMeasured(): {"split": PARTS},
    cut.FirstPartOnly(): {"split": PARTS},
    cut.LargestOfNothing(): {"split": "it raised RuntimeError: min"},
    cut.LearningRateOfThePart(): {"runs": "ranks would train at different learning rates"},
    cut.ShareOfThePart(): {"runs": r"returned 'entropy' as a Pool\(count, \d+.0\) on a part"},
    cut.GroupsInARow(): {"runs": "it raised IndexError: index out of range"},
    cut.TiesByOrder(): {"split": PARTS, "permutation": REORDERED},
    cut.FirstOfTheLargest(): {"permutation": REORDERED},
    cut.PlaceByOrder(): {"permutation": REORDERED},
    cut.RandomByOrder(): {"split": PARTS, "permutation": REORDERED, "replication": TWICE},
    cut.RandomByRow(): {"split": PARTS, "permutation": REORDERED, "replication": TWICE},
    cut.NeighbourInMemory(): {"split": PARTS, "permutation": REORDERED},
    cut.SumSoFar(): {"split": PARTS, "permutation": REORDERED, "replication": TWICE},
    cut.Bessel(): {"replication": TWICE},
    cut.ByTheNumberOfTokens(): {"replication": TWICE},
    cut.CountsPadding(): {"runs": PADDING},
    cut.RelativeToTheWidth(): {"runs": PADDING},
    cut.UnmaskedMean(): {"runs": PADDING},
    cut.GateOfOtherTokens(): {"live rows": "with other live outputs outside `plan.live_rows`: "},
    # it writes to what is not its own
    own.EditsItsInput(): {"pure": "it wrote to 'sum_p_sq' of the batch in place"},
    own.ClampsItsInput(): {"pure": "it wrote to 'advantages' of the batch in place"},
    own.ClipsByNumpy(): {"pure": "it wrote to 'entropies' of the batch in place"},
    own.ScalesWhatIsHeld(): {"pure": "it wrote to 'advantages' of the batch in place"},
    own.LimitsTheLivePolicy(): {"pure": "it wrote to the live 'logprobs' in place"},
    own.CountsInPlace(): {"pure": "it changed the state that it was given in place", "split": ANY_OF_PARTS},
    own.AveragesInPlace(): {"pure": r"it wrote to state\[.*\]\['entropy'\] in place", "split": ANY_OF_PARTS},
    own.AdvancesInTerms(): {"split": STATE_OF_PARTS},
    # it uses what a whole process shares
    own.GlobalRandomness(): {"pure": f"{DRAWS}torch", "process": f"{DRAWS}torch"},
    own.SeedsTheProcess(): {"pure": f"{DRAWS}torch", "process": f"{DRAWS}torch"},
    own.NumpyRandomness(): {"pure": f"{DRAWS}numpy", "process": f"{DRAWS}numpy"},
    own.PythonRandomness(): {"pure": f"{DRAWS}random", "process": f"{DRAWS}random"},
    own.FreshGenerator(): EVERYWHERE,
    own.WarnsByNumpy(): {"process": "it changed numpy's treatment of floating-point errors"},
    own.HashOfItsName(): {"process": ELSEWHERE},
    own.OrderOfASet(): {"process": ELSEWHERE},
    own.ProcessId(): {"process": ELSEWHERE},
    own.RankZeroActs(): {"process": ELSEWHERE},
    own.SeedOfTheDay(): {"process": ELSEWHERE},
    # it remembers outside of its state
    own.CalibratesOnce(): {"process": ELSEWHERE},
    own.RunningInTheModule(): EVERYWHERE,
    own.WarmsUpByCalls(): {"process": ELSEWHERE},
    own.KeepsOnItself(): {"process": ELSEWHERE},
    own.CachedByShape(): {"process": ELSEWHERE},
    # it reads what it does not declare, or cannot be saved
    own.UndeclaredSignal(): {"declared": "signals that it does not declare: the loss is "},
    own.UndeclaredPolicy(): {"declared": "with another .logprobs., which its `needs` does not name: "},
    own.UndeclaredMetric(): {"declared": "signals that it does not declare: the metric 'reference' is "},
    own.UndeclaredState(): {"declared": r"signals that it does not declare: state\['lag'\] is "},
    own.ForeignState(): {"serialises": r"state\['seen'\] is a tuple"},
    own.StateNamedTensor(): {"serialises": r"state\['tensor'\] has a name by which"},
    own.StateByNumber(): {"serialises": "state has the key 0"},
    own.HiddenSetting(factor=0.5): {"serialises": "its repr does not give it back"},
    loss.UndeclaredLiveRead(): {
        "declared": "it reads what it does not declare: a penalty differentiates 'entropies'",
        "live rows": "the live 'entropies' has a gradient outside",
    },
    # its numbers are no numbers, or too coarse
    loss.InverseProbability(): {"finite": BAD_WEIGHTS, "pure": BAD_WEIGHTS},
    loss.UnclampedExp(): {"finite": "the loss is nan"},
    loss.SumOfExponentials(): {"finite": "the metric 'softest' is inf in float32"},
    loss.DeviationOfOne(): {"finite": "the metric 'variance' is nan", "replication": "the metric 'variance' is "},
    loss.MeanOfNothing(): {"runs": BAD_WEIGHTS},
    loss.RestOfTheMass(): {"runs": BAD_WEIGHTS},
    loss.WrongShape(): {"runs": r"Terms.weight is torch.float32 of shape \(\d+,\), expected float of shape "},
    loss.Cancellation(): {"precision": "in float32: the loss is "},
    loss.HalfThreshold(): {"precision": "it computes in float16"},
    loss.BrainFloat(): {"precision": "it computes in bfloat16"},
    loss.TorchQuantile(): {"precision": "it calls torch.quantile"},
    # its gradient is not that of its loss, or is where none may be
    loss.GraphInAState(): {"detached": r"state\['scale'\] requires grad"},
    loss.InnerDetach(): {"gradcheck": SLOPE, "live ratio": "a ratio is "},
    loss.WrongAboveThree(): {"gradcheck": SLOPE},
    loss.WrongFarBelow(): {"gradcheck": SLOPE},
    loss.StillAtOne(): {"gradcheck": SLOPE},
    loss.HalfDetachedKL(): {"gradcheck": SLOPE},
    loss.DecidesOnTheLivePolicy(): {"gradcheck": "the loss jumps where the live 'logprobs' of token"},
    loss.OldInItsRatio(): {"live ratio": "`live_ratio` is set, and a ratio is "},
    loss.RatioOfDroppedTokens(): {"masked": "a dropped token has a policy gradient", "live ratio": "a ratio is "},
    loss.IgnoresTheAdvantage(): {"zero advantage": "all advantages are 0 and the policy term still has a gradient"},
    loss.ConstantPush(): {"zero advantage": "all advantages are 0 and the policy term still has a gradient"},
    # it is not what it means to be
    loss.FalseLimit(): {"limits": "against no method: the loss is "},
    loss.StrictTopShare(): {"limits": "against no method: the loss is "},
    loss.ReversedClip(): {"oracle": ORACLE},
    loss.StrictShare(): {"oracle": ORACLE},
    loss.StrictSetting(): {"oracle": ORACLE},
    loss.StrictLiteral(): {"oracle": ORACLE},
    loss.OpenTrustRegion(): {"oracle": ORACLE},
    loss.ZeroIsRewarded(): {"oracle": ORACLE},
    loss.SignOfThePunished(): {"oracle": ORACLE},
    loss.ForgetsTheMinimum(): {"oracle": ORACLE},
}

#: Laws that a method breaks in some runs, by what it remembers of the methods and steps before.
ALSO: Mapping[str, frozenset[str]] = {"cached_by_shape": frozenset({"replication", "split"})}

#: Oracles of those that break the law *oracle*.
ORACLES: Mapping[str, Oracle] = {
    "reversed_clip": loss.clip,
    "strict_share": loss.top_share,
    "strict_setting": loss.at_least_a_level,
    "strict_literal": loss.at_least_a_fifth,
    "open_trust_region": loss.up_to_a_bound,
    "zero_is_rewarded": loss.rewarded_only,
    "sign_of_the_punished": loss.raised_by_size,
    "forgets_the_minimum": loss.pessimist,
}
