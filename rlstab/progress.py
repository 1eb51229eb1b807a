"""The time left in a progress bar."""

from __future__ import annotations

from rich.progress import Task, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

#: Seconds before a time is shown: the first steps are slower than the rest, or lack an evaluation.
TIMED = 10.0

#: Seconds over which the speed is measured; a step may take minutes.
PERIOD = 3600.0


class TimeLeft(TimeRemainingColumn):
    """``about 1:30``, once it can be estimated."""

    def __init__(self) -> None:
        super().__init__(compact=True, table_column=Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        """The cell of a task."""
        if task.finished or not task.speed or (task.elapsed or 0) < TIMED:
            return Text("")
        return Text("about ", style="progress.remaining") + super().render(task)
