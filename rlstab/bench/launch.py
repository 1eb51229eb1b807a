"""A command that a bench starts for each run in place of rlstab's trainer, and its placeholders.

::

    command: accelerate launch train.py --objective {objective} --seed {seed} --output_dir {out} --lr {lr}
    settings: {slow: {lr: 1.0e-6}, fast: {lr: 2.0e-6}}

A placeholder is a name in braces; ``{{name}}`` stands for ``{name}`` itself, and other braces for themselves. The
command is split as a shell would split it before anything is filled in, so a value is never more than one argument.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlstab.config.allowed_changes import digest
from rlstab.config.document import Document, dump, flow
from rlstab.config.objectives import build_objective, dump_objective
from rlstab.config.user_code import checksums, portable
from rlstab.errors import ConfigError, did_you_mean
from rlstab.files import replace_file
from rlstab.run_files import CONFIG, OUT
from rlstab.safe_read import read_text

#: Placeholders that the bench fills in itself.
RESERVED = ("objective", "seed", "out", "method", "setting", "config")
#: Folder for the filled-in files, inside the folder of a run.
GIVEN = "given"

#: Pattern of a placeholder's name.
NAME = re.compile(r"[A-Za-z_][\w.-]*")
_PLACEHOLDER = re.compile(rf"\{{(\{{)?({NAME.pattern})\}}(?(1)\}})")


def placeholders(text: str) -> set[str]:
    """The names of the placeholders in a text."""
    return {match[2] for match in _PLACEHOLDER.finditer(text) if not match[1]}


def filled(text: str, values: Mapping[str, Any]) -> str:
    """The text with its placeholders filled in: text as it is, other values as YAML writes them."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:-1]
        data = values[match[2]]
        return data if isinstance(data, str) else flow(data)

    return _PLACEHOLDER.sub(value, text)


def template_of(
    document: Document, command: str, config: str | None, value_names: Iterable[str], folder: Path
) -> Launch:
    """The command of a bench file, before it is filled in for a run.

    Args:
        document: the bench file.
        command: the command as the file has it.
        config: path of a file with placeholders, relative to ``folder``.
        value_names: names that its methods and settings give values.
        folder: the folder of the bench file.

    Raises:
        ConfigError: it cannot be split, a file cannot be read, a placeholder is unknown, or the runs would write into
            one folder or share a seed.
    """
    try:
        arguments = shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise document.error(("command",), f"cannot be split into arguments: {error}. Close the quotes.") from None
    if not arguments or "=" in arguments[0]:
        text = "a command starts with a program. Write `env NAME=value PROGRAM ...` to set variables."
        raise document.error(("command",), text)
    fillable = {*RESERVED, *value_names} - ({"config"} if config is None else set())
    names = placeholders(" ".join(arguments))
    for name in sorted(names - fillable):
        text = f"{{{name}}} is not filled in by anything. {did_you_mean(name, fillable)} Double braces that stay."
        raise document.error(("command",), text)
    for name, effect in (("out", "all runs would write into one folder"), ("config", "the file would not be read")):
        if name in fillable and name not in names:
            raise document.error(("command",), f"without {{{name}}} {effect}. Add it to the command.")
    file = None
    if config is not None:
        try:
            text = read_text(folder / config)
        except (OSError, ValueError) as error:
            raise document.error(("config",), f"{config} cannot be read: {error}.") from error
        for number, line in enumerate(text.splitlines(), 1):
            for name in sorted(placeholders(line) - fillable | placeholders(line) & {"config"}):
                hint = did_you_mean(name, fillable - {"config"})
                raise ConfigError(f"{folder / config}:{number}: {{{name}}} is not filled in by anything. {hint}")
        file = (Path(config).name, text)
    launch = Launch(tuple(arguments), file)
    if "seed" not in launch.names:
        raise document.error(("command",), "without {seed} all runs would have one seed. Add it to the command.")
    return launch


@dataclass(frozen=True)
class Launch:
    """The command of one run.

    Attributes:
        arguments: texts with placeholders, the program first.
        config: name and text of a file that is filled in too; ``{config}`` is its path.
        objective: the resolved objective of the method; empty if the command does not take one.
        values: those of the method and the setting, by placeholder.
        seed: the seed of the run.
    """

    arguments: tuple[str, ...]
    config: tuple[str, str] | None
    objective: Sequence[dict[str, Any]] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def names(self) -> set[str]:
        """All placeholders of the command and its file."""
        return placeholders(" ".join([*self.arguments, *(self.config or ())[1:]]))

    @property
    def settings(self) -> dict[str, Any]:
        """The content of ``config.yaml`` in the run's folder, as plain data."""
        file = {} if self.config is None else {"config": digest(self.config)}
        settings = {"settings": dict(self.values)} if self.values else {}
        command = {"command": shlex.join(self.arguments), **file}
        return {"objective": list(self.objective), **settings, **command, "seed": self.seed}

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits over the launch and the files of user-defined methods."""
        return digest(portable(self.settings) | {"code": checksums(self.settings)})

    def prepare(self, folder: Path, *, resume: bool, **names: str) -> list[str]:
        """Write the files that the command reads, and return its arguments, filled in; paths are absolute.

        Args:
            folder: the folder of the run; the command writes to ``out`` in it.
            resume: without it, files of an earlier command in ``out`` are moved aside.
            names: the names of the method and the setting.
        """
        out, filled_in = folder / OUT, folder / GIVEN
        if not resume and out.is_dir():
            number = sum(1 for _ in folder.glob(f"{OUT}-before-*"))
            out.rename(folder / f"{OUT}-before-{number + 1}")
        for path in (out, filled_in):
            path.mkdir(parents=True, exist_ok=True)
        name, text = self.config or ("", "")
        paths = {"objective": filled_in / "objective.yaml", "out": out, "config": filled_in / name}
        values = {**self.values, **{key: str(path.absolute()) for key, path in paths.items()}}
        values |= {"seed": self.seed, **names}
        replace_file(folder / CONFIG, dump(self.settings))
        replace_file(paths["objective"], dump({"objective": list(self.objective)}))
        if name:
            replace_file(paths["config"], filled(text, values))
        return [filled(argument, values) for argument in self.arguments]


def launch_of(template: Launch, document: Document, run: Document) -> Launch:
    """The launch of a method in a setting, without its seed.

    Args:
        template: the command of the bench.
        document: the bench file.
        run: the values of the run by placeholder, and ``objective``.

    Raises:
        ConfigError: a value is missing, or changes nothing.
        Conflict: the methods of the objective do not fit together.
    """
    values = dict(_leaves({key: value for key, value in run.data.items() if key != "objective"}))
    for name in sorted(template.names - {*RESERVED, *values}):
        text = f"{{{name}}} has no value. Give it one in each setting, or under `set` of each method."
        raise document.error(("command",), text)
    for name in values.keys() - template.names:
        raise run.error(tuple(name.split(".")), f"changes nothing: the command has no {{{name}}}. Add it there.")
    takes = "objective" in template.names
    if run.data["objective"] and not takes:
        raise run.error(("objective",), "changes nothing: the command has no {objective}. Add it there.")
    objective = dump_objective(build_objective(run)) if takes else []
    return replace(template, objective=objective, values=values)


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted name."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
