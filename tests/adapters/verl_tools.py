"""A tool for verl's agent loop, which `rollout.multi_turn.function_tool_path` names."""

from verl.tools.function_tool import function_tool


@function_tool
def double(number: int) -> tuple[str, float]:
    """Double a number.

    Args:
        number: to double.
    """
    return f"it is {2 * number}", number / 4
