"""Completions that try to hang, crash, execute, or write to the terminal. It must not import torch."""

from functools import cache
from pathlib import Path
from typing import Any

from rlstab.tasks.scorers import GymScorer

NESTED = [
    "$9^{9^{9^{9}}}$", "9**9**9**9", "(9**9**9)%10", "1e999999999", r"\boxed{9^{9^{9^{9^{9}}}}}",
    r"$\left(10^{10^{10}}\right)!$", "factorial(10**9)", r"$\binom{10^9}{5\cdot 10^8}$", "-" * 3000 + "1",
    r"$\sum_{n=1}^{10^{12}} \frac{1}{n^{n}}$", r"$\int_0^\infty e^{-x^{x^{x}}} dx$", r"$\sqrt[10^{10}]{10^{10^{10}}}$",
    r"$x^{10^{7}}+y=(x+y)^{10^{7}}$", r"$\frac{10^{10^{9}}}{10^{10^{9}}-1}$",
]  # fmt: skip

LONG = [
    "1" + "0" * 1_000_000, "0." + "3" * 200_000, "a" * 1_000_000, " " * 1_000_000, "\n" * 300_000, "1," * 200_000,
    "1+" * 50_000 + "1", "#### 1\n" * 50_000, "1/" * 20_000 + "1", "x" * 65_536 + "\0", "\u20ac" * 400_000,
    "0x" + "f" * 100_000, "1_" * 50_000 + "1", r"\frac{1}{2}" * 5000, r"$1$ " * 20_000, r"\boxed{1}" * 5000,
]  # fmt: skip

_NESTS = [
    ("", "(", "1", ")", 30_000), ("", "[", "", "]", 100_000), ("", '{"a":', "1", "}", 50_000),
    ("$", r"\frac{1}{", "1", "}", 5000), ("$", r"\sqrt{", "2", "}", 5000), ("$", "x^{", "x", "}", 5000),
    ("$", r"\left(", "1", r"\right)", 5000), ("", r"\boxed{", "1", "}", 20_000),
]  # fmt: skip
DEEP = [
    mark + opening * depth + middle + closing * depth + mark
    for mark, opening, middle, closing, most in _NESTS
    for depth in (20, 500, most)
] + [
    "not " * 20_000 + "True", "-" * 20_000 + "1", "~" * 20_000 + "1", "lambda:" * 2000 + "1", "a." * 20_000 + "a",
    "$" + r"\begin{matrix}" * 300 + r"\end{matrix}" * 300 + "$", "<a>" * 50_000, "f(" * 5000 + ")" * 5000,
]  # fmt: skip

BACKTRACKING = [
    "a" * 40 + "!", "a" * 30_000 + "!", "####" + " " * 50_000, "1 " * 30_000 + "x", r"\boxed{" * 5000, "((" * 15_000,
    "1.1" * 20_000, "$1" + "," * 50_000 + "1$", "-" * 50_000, "\\text{" * 5000, "=1" * 20_000 + "=",
    "\\[" * 20_000 + "1", "final answer is $" * 10_000, '"' * 50_001, "1\\\\" * 20_000, "_{" * 20_000,
]  # fmt: skip

FORMATS = [
    "{0.__class__.__mro__}", "%s" * 1000, "%(a)s", "{0:>999999999}", "%999999999d", "${jndi:ldap://127.0.0.1/a}",
    "$(sleep 100)", "`sleep 100`", "; sleep 100 #", "| sleep 100", "../" * 50, "/dev/zero", "file:///dev/zero",
    "!!python/object/apply:time.sleep [100]", "cos\nsystem\n(S'sleep 100'\ntR.", "'; DROP TABLE runs; --",
    "[bold red]x[/bold red]", "NaN", "Infinity", "1e309", "None", "True", "null", "[]", "{}", '""', "0x10", "1_0",
    "\u0661", "\uff11", "\u00bd", "\u2460", "--1", "+-1", "1/0", "0**-1",
]  # fmt: skip

TERMINAL = [
    "\x1b[2J\x1b[H", "\x1b]0;owned\x07", "\x1b]8;;http://example.org\x07x\x1b]8;;\x07", "\x9b31m", "\b" * 1000,
    "\r" * 1000, "\x1bc", "\x1b[?1049h", "\x1b]52;c;eA==\x07", "\x00" * 10_000, "1\x00", "\x00$1$", "\x1a", "\x04",
    "\x7f" * 100, "\u202e1+1", "\u2066\u2067\u2068", "\u200b" * 1000, "\ufeff1", "\u2028\u2029", "\x85", "\xa0" * 1000,
    "\udfff\ud800", "1\udc80", "$\ud83d$", "\ufffe\uffff", "\U0010ffff" * 1000, "e\u0301" * 10_000, "\ufdfa" * 10_000,
    "\u1e9e\u0130\ufb03" * 1000, "\x0b\x0c\x1c\x1d\x1e\x1f",
]  # fmt: skip


def payloads(canary: Path) -> list[str]:
    """Python that makes a file in a folder, in the forms in which scorers might execute it."""

    def touch(name: str) -> str:
        return f"__import__('pathlib').Path('{canary}/{name}').touch()"

    forms = [
        "{}", "[{}]", "({},)", "str({})", "[[{}]]", "{{1: {}}}", "1 + len([{}])", "${}$", "\\boxed{{{}}}", "#### {}",
        "```python\n{}\n```", "f'{{{}}}'", "x={}", "{} or 1", "[{} for _ in range(2)]", "(lambda: {})()",
        "'a' if {} else 'b'", "\n{}", " {}", "{}\n", "print({})", "import os\n{}", "C + {}", "x**2 + ({})", "{};",
        "<answer>{}</answer>", "answer: {}",
    ]  # fmt: skip
    raw = [
        f"__import__('os').system('touch {canary}/os')",
        f"eval(\"open('{canary}/eval', 'w')\")",
        f"open('{canary}/open', 'w')",
        f"[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0](['touch', '{canary}/popen'])",
        f"!!python/object/apply:os.system ['touch {canary}/yaml']",
        f"cos\nsystem\n(S'touch {canary}/pickle'\ntR.",
        f"$(touch {canary}/shell)",
        f"\\input{{|touch {canary}/latex}}",
        f"sympify(\"open('{canary}/sympify', 'w')\")",
    ]
    return [form.format(touch(f"form{number}")) for number, form in enumerate(forms)] + raw


def hostile(canary: Path) -> list[str]:
    """All of them; those that execute make a file in the folder."""
    return [*NESTED, *LONG, *DEEP, *BACKTRACKING, *FORMATS, *TERMINAL, *payloads(canary)]


@cache
def scorer_of(name: str) -> GymScorer:
    scorer = GymScorer(name, {}, None, None)
    scorer.prepare()
    return scorer


class AnyDataSet:
    """The scorers of all data sets of reasoning-gym: an answer is a name and an entry."""

    def prepare(self) -> None:
        scorer_of("chain_sum")  # imports reasoning-gym, while processes may still be started

    def score(self, prompt: str, completion: str, answer: Any) -> float:
        name, entry = answer
        return scorer_of(name).score(prompt, completion, entry)
