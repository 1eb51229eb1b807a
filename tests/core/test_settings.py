import math

import pytest

from rlstab.core.settings import Range, settings_of
from rlstab.errors import OutOfRange
from tests.core.methods import Chooser
from tests.core.says import says


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"share": 0.0}, "share = 0.0, expected float in (0, 1]. The default is 0.5."),
        ({"share": math.nan}, "share = nan, expected float in (0, 1]. The default is 0.5."),
        ({"share": True}, "share = True, expected float in (0, 1]. The default is 0.5."),
        ({"share": "0.1"}, "share = '0.1', expected float in (0, 1]. The default is 0.5."),
        ({"share": None}, "share = None, expected float in (0, 1]. The default is 0.5."),
        ({"cap": 1}, "cap = 1, expected float in (1, inf) or None. The default is None."),
        ({"cap": math.inf}, "cap = inf, expected float in (1, inf) or None. The default is None."),
        ({"mode": "some"}, "mode = 'some', expected 'kept' | 'all'. The default is 'kept'."),
        ({"mode": None}, "mode = None, expected 'kept' | 'all'. The default is 'kept'."),
        ({"maybe": "c"}, "maybe = 'c', expected 'a' | 'b' or None. The default is None."),
        ({"must": 2.0}, "must = 2.0, expected int in [1, inf)."),
        ({"must": 0}, "must = 0, expected int in [1, inf)."),
        ({"must": True}, "must = True, expected int in [1, inf)."),
        ({"flag": 1}, "flag = 1, expected bool. The default is False."),
        ({"free": "1"}, "free = '1', expected float. The default is 0.0."),
        ({"label": 3}, "label = 3, expected str. The default is 'x'."),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(chosen, text):
    with says(OutOfRange, f"'chooser': {text}"):
        Chooser(**({"must": 1} | chosen))


@pytest.mark.parametrize(
    "chosen",
    [{}, {"share": 1}, {"share": 1e-9}, {"cap": 2}, {"mode": "all"}, {"maybe": "b"}, {"flag": True}, {"free": -1e9}],
)
def test_a_right_setting_is_kept_as_given(chosen):
    made = Chooser(must=3, **chosen)
    assert {name: getattr(made, name) for name in chosen} == chosen


def test_ranges_print_as_intervals():
    assert [str(one) for one in (Range(), Range(ge=0), Range(gt=0, lt=2), Range(le=1))] == [
        "(-inf, inf)",
        "[0, inf)",
        "(0, 2)",
        "(-inf, 1]",
    ]


def test_settings_are_read_off_the_annotations():
    found = {one.name: one for one in settings_of(Chooser)}
    assert list(found) == ["must", "share", "cap", "mode", "maybe", "flag", "free", "label"]
    assert found["mode"].choices == ("kept", "all")
    assert (found["cap"].optional, found["share"].optional) == (True, False)
    assert found["share"].range == Range(gt=0, le=1)
