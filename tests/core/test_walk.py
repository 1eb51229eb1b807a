from rlstab import STARE, ClipHigher, KLPenalty, S2TMask, TopEntropyMask, compose, within
from rlstab.core.compose import walk


def places(objective):
    return [(leaf.name, [outer.name for outer in leaf.around]) for leaf in walk(objective)]


def test_leaves_stand_in_the_order_of_the_composition_with_what_is_around_them():
    inner = compose(STARE(), within(TopEntropyMask(), KLPenalty()))
    assert places(compose(within(S2TMask(), inner), ClipHigher())) == [
        ("clip_higher", []),
        ("s2t", []),
        ("stare", ["s2t"]),
        ("top_entropy", ["s2t"]),
        ("kl", ["s2t", "top_entropy"]),
    ]
    assert places(within(within(S2TMask(), TopEntropyMask()), STARE()))[2] == ("stare", ["s2t", "top_entropy"])


def test_two_are_nested_where_one_is_around_the_other_and_not_where_equal_ones_are():
    first, second = within(S2TMask(), STARE()), within(S2TMask(), STARE(share=0.2))
    alone, s2t, stare, other_s2t, other_stare = walk(compose(first, second, TopEntropyMask()))
    assert (s2t.name, stare.name, other_s2t.name, other_stare.name) == ("s2t", "stare", "s2t", "stare")
    assert s2t.nested(stare)
    assert stare.nested(s2t)
    assert not stare.nested(other_s2t)
    assert not stare.nested(alone)
