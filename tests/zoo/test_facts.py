"""What classes declare of their limits is true."""

from tests.examples import EXAMPLES

ABOUT = {name: type(methods[0]).about for name, methods in EXAMPLES.items()}


def test_a_limit_is_reached_at_its_settings_alone() -> None:
    for name, about in ABOUT.items():
        assert about.no_op_at
        for limit in about.no_op_at:
            assert limit.reached(limit.at(EXAMPLES[name][0])) == (limit.settings is not None)
