"""User-defined rewards for examples/own_reward.yaml: functions of prompt, completion and answer that return a number.

They run in separate processes, with a time limit. The same three arguments must give the same number: no random
numbers, no clock, no state.
"""

import re


def closeness(prompt: str, completion: str, answer: object) -> float:
    """How close the last result is to the target of a prompt like `3 7 8>29:`: 1 on target, 1/2 if off by one."""
    results = re.findall(r"=([0-9]{1,4})", completion)
    if not results:
        return 0.0
    target = int(prompt.partition(">")[2].rstrip(":"))
    return 1 / (1 + abs(target - int(results[-1])))


def right_number_of_steps(prompt: str, completion: str, answer: object) -> bool:
    """Whether there are as many steps as it takes to use every number: True counts as 1, False as 0."""
    numbers = prompt.partition(">")[0].split()
    return completion.count("=") == len(numbers) - 1
