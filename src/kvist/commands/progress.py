"""Progress of long work, with the time that is left: on standard error, where that is a terminal."""

import sys
from typing import Any


class Bar:
    """A bar for each stage of the work; nothing where nobody looks."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "Bar":
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, stage: str, done: float, description: str | None = None) -> None:
        """A stage has come so far, a share of 1; its name stands beside it, or what is said of it."""
        if self._bar is None:
            return
        if stage not in self._tasks:
            for task in self._tasks.values():
                self._bar.update(task, completed=1.0)
            self._tasks[stage] = self._bar.add_task(stage, total=1.0)
        self._bar.update(self._tasks[stage], completed=done, description=description or stage)
