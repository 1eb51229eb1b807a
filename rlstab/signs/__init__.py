"""Signs that something goes wrong in a run, each defined once: for the report, for `look`, and for a live run.

A sign is found in the curves of a run so far, and has the step at which it begins. One test is behind nearly all of
them: that a curve has moved by more than the same values in random order do (:mod:`rlstab.signs.metric`), and by as
much as matters, which is a choice that stands with its reason in the file of its family. docs/how-to/diagnose.md says
how often they are right, on runs that other people published.

A sign that hurt the run (its reward, its held-out score, its finished answers; or nothing could be learnt at all) may
have a cause; any other sign is an observation. No single curve shows a collapse, and each sign is judged by itself.
"""

# each file registers its detectors, in the order in which a reader looks at them
# ruff: isort: off
from rlstab.signs.reward import below_start as below_start, reward_fall as reward_fall
from rlstab.signs import entropy as entropy, gradient as gradient, answers as answers, sampler as sampler
from rlstab.signs.sign import COUNTED as COUNTED, SIGNS as SIGNS, TOTALS as TOTALS, Curves as Curves, Sign as Sign
from rlstab.signs.sign import counted_signs as counted_signs, signs as signs
