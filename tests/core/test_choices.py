"""Arguments that are one of a few texts: every public function and class refuses another text, with the nearest."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import rlstab
from rlstab.core.method_settings import check_choices
from rlstab.errors import MissingPackage, OutOfRange

#: What only rlstab calls or fills in, and what passes the argument on to a function that checks it.
INTERNAL = {
    *("BundledExample", "CutResult", "IdleSign", "Law", "Loss", "MapCell", "Paired", "Pool"),
    *("Result", "RunFacts", "RunRecord"),
    *("Generator.answered", "OptimizerStep.make_plan", "Shift.example", "Task.example", "TextTask.leave_out"),
    *("example", "make_report", "require_kind"),
}


def has_literal(hint: Any) -> bool:
    return get_origin(hint) is Literal or any(map(has_literal, get_args(hint)))


def public() -> Iterator[tuple[str, Any]]:
    """The functions, classes and public methods of classes that rlstab defines, each by its name."""
    for found in pkgutil.walk_packages(rlstab.__path__, "rlstab."):
        try:
            module = importlib.import_module(found.name)
        except MissingPackage:
            continue
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") != found.name or name.startswith("_"):
                continue
            if inspect.isfunction(value) or inspect.isclass(value):
                yield name, value
            for inner, method in vars(value).items() if inspect.isclass(value) else ():
                if inspect.isfunction(getattr(method, "__func__", method)) and not inner.startswith("_"):
                    yield f"{name}.{inner}", getattr(value, inner)


@pytest.mark.slow  # it imports every module
def test_every_text_argument_of_the_public_api_refuses_another_text() -> None:
    tried = set()
    for name, value in public():
        start = vars(value).get("__init__") if inspect.isclass(value) else value
        if start is None:
            continue
        try:
            hints = get_type_hints(start)
        except (NameError, AttributeError, TypeError):
            continue  # such as a class that is written in C
        for argument in [each for each, hint in hints.items() if each != "return" and has_literal(hint)]:
            if name in INTERNAL:
                continue
            tried.add((name, argument))
            needed = [
                each.name
                for each in inspect.signature(value).parameters.values()
                if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            ]
            given = dict.fromkeys(needed, 1.0 if inspect.isclass(value) else None)
            with pytest.raises(OutOfRange, match=rf"{argument} = 'no such text'"):
                value(**given | {argument: "no such text"})
    assert {("make_plan", "scope"), ("HostMean", "over"), ("run_bench", "launcher"), ("S2TMask", "population")} <= tried
    assert len(tried) > 40


@pytest.mark.parametrize(("value", "hint"), [("flor", "Did you mean 'floor'"), (None, "Known: ceil"), (1, "Known")])
def test_the_nearest_is_named(value: Any, hint: str) -> None:
    def rounded(rounding: Literal["ceil", "floor"]) -> None:
        check_choices(rounded, rounding=rounding)

    rounded("floor")
    with pytest.raises(OutOfRange, match=rf"rounded: rounding = {value!r}\. {hint}"):
        rounded(value)


def test_none_and_numbers_are_choices_where_the_annotation_has_them() -> None:
    def chosen(base: Literal["config"] | None = None, ddof: Literal[0, 1] = 0) -> None:
        check_choices(chosen, base=base, ddof=ddof)

    chosen()
    chosen("config", 1)
    wrong: tuple[Any, ...]
    for wrong in ((False,), ([],), ("config", True), (None, 1.0)):
        with pytest.raises(OutOfRange, match=r"chosen: (base|ddof) = "):
            chosen(*wrong)
