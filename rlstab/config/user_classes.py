"""User-defined classes, by ``path/to/file.py:Name``: loaded, checked and made.

Naming a file of code runs it in the process that reads the YAML: :func:`load_class` is called for files that the user
gave to a command, never for those in a run folder that a report or a viewer reads.
"""

import inspect
import json
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from rlstab.config.document import Document, Keys
from rlstab.config.user_code import candidates, find
from rlstab.core.comm import LocalComm
from rlstab.core.method import Method, State, measure_all
from rlstab.core.method_checks import DECLARED, check_mapping
from rlstab.core.registry import Registry
from rlstab.core.saved_state import dump_state
from rlstab.errors import ConfigError, MethodError, RlstabError, did_you_mean, kind_of
from rlstab.files import in_one_line, is_file, load_module

Kind = TypeVar("Kind", bound=Method[Any])

_files_of: dict[type, str] = {}


def load_class(document: Document, text: str, keys: Keys, noun: str, fix: str) -> type:
    """The class that a text names.

    Args:
        document: gives errors their file and line; its paths are :func:`located`.
        text: ``path/to/file.py:Name``.
        keys: the keys of the text in the document.
        noun: what the class should be, in errors: ``a method``.
        fix: what to do if it is something else.

    Raises:
        ConfigError: there is no such file or name, the file cannot be loaded, or it is not a class.
    """
    file, _, name = text.rpartition(":")
    path = find(document, file, keys)
    if path is None or not is_file(path):
        looked = " or ".join(map(str, candidates(document, file, keys)))
        raise document.error(keys, f"there is no file {looked}. Correct the path, or create the file.")
    try:
        module = load_module(path)
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise document.error(keys, f"{path} cannot be loaded: {in_one_line(error, path)}. Correct it.") from error
    try:
        cls = operator.attrgetter(name)(module)
    except AttributeError as error:
        classes = [value for value in vars(module).values() if inspect.isclass(value)]
        defined = [cls.__name__ for cls in classes if cls.__module__ == module.__name__]
        public = [name for name in defined if not name.startswith("_")]
        hint = did_you_mean(name, public) if public else f"Define it: {fix}"
        raise document.error(keys, f"{path} has no class '{name}'. {hint}") from error
    if not inspect.isclass(cls):
        raise document.error(keys, f"'{name}' in {path} is {kind_of(cls)}, not {noun}. {fix}")
    _files_of[cls] = f"{path}:{name}"
    return cls


def load_method(document: Document, text: str, keys: Keys, registry: Registry[Kind]) -> type[Kind]:
    """The method or stage that a text names.

    Raises:
        ConfigError: see :func:`load_class`; the class is not a method, or has the name of another one.
    """
    noun, base = registry.noun, registry.base
    fix = f"Name a class that inherits from {base.__module__}.{base.__name__}."
    cls = load_class(document, text, keys, f"a {noun}", fix)
    where = f"'{cls.__qualname__}' in {_files_of[cls].rpartition(':')[0]}"
    if not issubclass(cls, base):
        raise document.error(keys, f"{where} is not a {noun}. {fix}")
    if inspect.isabstract(cls):
        raise document.error(keys, f"{where} lacks {', '.join(sorted(cls.__abstractmethods__))}. Define it there.")
    if cls.name in registry.names() and registry.get(cls.name) is not cls:
        text = f"{where} has the name '{cls.name}' of another {noun}. Give the class another `name`."
        raise document.error(keys, text)
    return cls


def name_in_yaml(method: Method[Any]) -> str:
    """What YAML calls a method or a stage."""
    return _files_of.get(type(method), method.name)


@contextmanager
def blamed(action: str, fix: str, path: Path | None = None) -> Iterator[None]:
    """Run user code, and report whatever it raises in one line; errors of rlstab are not changed.

    Raises:
        ConfigError: says that ``action`` raised, with the last line of the user's file, and the fix.
    """
    try:
        yield
    except RlstabError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{action} raised {in_one_line(error, path)}. {fix}.") from error


def make(cls: type[Kind], settings: Mapping[str, Any]) -> Kind:
    """A method or stage. Of a user-defined one, the declared properties and the first states are tried.

    Raises:
        ConfigError: user code raises.
        MethodError: a checkpoint cannot hold a state.
    """
    if cls.__module__.startswith("rlstab."):
        return cls(**settings)
    file, fix = _files_of.get(cls, "").rpartition(":")[0], "Correct the class"
    path = Path(file) if file else None
    with blamed(f"'{cls.name}': __init__", fix, path):
        method = cls(**settings)
    for name in DECLARED:
        with blamed(f"'{cls.name}': {name}", fix, path):
            getattr(method, name, None)
    with blamed(f"'{cls.name}': init_state", fix, path):
        state = method.init_state()
    check_mapping(cls.name, "init_state", state)
    require_storable(cls.name, "init_state", state)
    with suppress(Exception):  # its result without tokens is tried when a rank has none
        state = measure_all(method, [], state, LocalComm())[1]
    require_storable(cls.name, "advance", state)
    return method


def require_storable(owner: str, method: str, state: State) -> None:
    """Refuse a state that JSON and safetensors do not restore exactly.

    Raises:
        MethodError: names the function that returned it, and the key.
    """
    for key, value in state.items():
        try:
            plain = dump_state({key: value})[0]
            restored = json.loads(json.dumps(plain))
            survives = restored == plain or repr(restored) == repr(plain)  # NaN is not equal to itself
            reason = "" if survives else "JSON gives it back as something else"
        except Exception as error:  # objects of any kind
            reason = in_one_line(error)
        if reason:
            raise MethodError(
                f"'{owner}': {method} returned a state whose {key!r} is {kind_of(value)}, which a checkpoint cannot "
                f"hold: {reason}. Make it a number, a bool, a text, a tensor, or a dict of them with texts as keys."
            )
