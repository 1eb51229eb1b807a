"""The laws: what every method obeys, each a check on a drawn case that raises ``BrokenLaw`` with what it saw.

They stand in :mod:`rlstab.testing.laws_of_purity`, :mod:`rlstab.testing.laws_of_agreement` and
:mod:`rlstab.testing.laws_of_the_loss`.
"""

from __future__ import annotations

from rlstab.testing import laws_of_agreement as agreement
from rlstab.testing import laws_of_purity as purity
from rlstab.testing import laws_of_the_loss as loss
from rlstab.testing.law import Case, Law, NotHere

#: The law that is checked first: where it is broken, no other one is checked.
RUNS = Law("runs", "what it returns is what the interface asks for", purity.runs)

#: The laws of methods, in the order of the report.
LAWS: tuple[Law, ...] = (
    RUNS,
    Law("finite", "finite on extreme inputs", loss.finite, draws="extreme"),
    Law(
        "pure",
        "nothing of others written to, no global randomness, same call same result",
        purity.pure,
    ),
    Law("detached", "no tensor in terms or state requires grad", loss.detached),
    Law(
        "split",
        "any cut into parts and ranks: same loss, gradient, metrics, next state",
        agreement.split,
        ranks=True,
        second=True,
    ),
    Law("permutation", "any order of tokens and sequences", agreement.permutation),
    Law("order-free", "listed anywhere in a composition, bit for bit", agreement.order_free),
    Law("replication", "the batch twice: the same loss", agreement.replication),
    Law("packed", "content and amount of padding do not matter, bit for bit", agreement.packed),
    Law("masked", "dropped tokens have exactly no policy gradient", loss.masked),
    Law("gradcheck", "the gradient is that of finite differences, anchor fixed", loss.gradcheck),
    Law("live rows", "live outputs outside the rows that a plan names do not matter", agreement.live_rows),
    Law("live ratio", "where the live policy is its own denominator, every ratio is 1", loss.live_ratio),
    Law("zero advantage", "no advantage, no policy gradient", loss.zero_advantage),
    Law("declared", "reads `needs` and `live_needs`, and nothing else", purity.declared),
    Law("monoid", "statistics merge in any order; empty ones change nothing", agreement.monoid, second=True),
    Law("serialises", "repr and state survive, and the run goes on", purity.serialises, second=True),
    Law("process", "another process gives the same, whatever this one has seen", purity.process, second=True),
    Law("precision", "float32 and bfloat16 within a bound of float64; no half precision", loss.precision, "smooth"),
    Law("limits", "the identity at its `no_op_at`, bit for bit", loss.limits),
)

__all__ = ["LAWS", "RUNS", "Case", "Law", "NotHere"]
