"""User-defined rewards, which worker processes load from this file: it must not import torch."""

import time


def graded(prompt, completion, answer):
    return (len(completion) + sum(map(ord, completion))) % 5 / 4


def hangs(prompt, completion, answer):
    if sum(map(ord, completion)) % 3 == 1:
        time.sleep(1000)
    return 1 / (1 + len(completion))
