"""All tolerances of the laws, each with its derivation."""

#: Sums over parts or ranks in another order, in float64. A sum of n numbers in any order is off by at most
#: n * 2^-53 of the sum of their absolute values; a step of the laws has n < 200 tokens and few terms each: 2e-14 per
#: sum. The denominator, the merge of means and one product add as much again; 1e-12 leaves a factor of ten.
REORDERED = 1e-12

#: float32 against float64 on inputs that float32 holds exactly. ``exp`` of a log-ratio d in [-20, 20] turns the
#: rounding of d, 2^-24 * 20 = 1.2e-6, into the relative error of the ratio; weights and penalties multiply a handful of
#: such factors. Relative to the sum of absolute contributions.
SINGLE = 2e-5

#: Central differences in float64 with a step of 1e-6: truncation 1e-12 * f''' / 6, rounding 2^-53 / 1e-6 = 1e-10 of
#: |f|; torch.autograd.gradcheck adds both per entry. Absolute, for losses of order one.
GRADCHECK_ABSOLUTE = 1e-6
GRADCHECK_RELATIVE = 1e-4
GRADCHECK_STEP = 1e-6

#: A scalar loop of Python floats against vectorised float64: the same numbers in another order, and ``exp`` of another
#: library, which may differ in the last bit.
ORACLE = 1e-9
