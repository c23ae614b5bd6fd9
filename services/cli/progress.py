"""Tells of the progress of long work on standard error. Knows nothing of the work."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

if TYPE_CHECKING:
    from services.batch.run import Progress as BatchProgress

LINE_EVERY_S = 10.0


class _Bars:
    """Bars that are taken off the terminal when their work ends, however it does."""

    _progress: Progress | None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


class StageBar(_Bars):
    """A bar per stage of some work, drawn only once there is something to show."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def show(self, stage: str, done: int, total: int) -> None:
        """Draw `done` of `total` bytes of a stage; fits the loader's progress callback."""
        if total == 0:
            return  # nothing to do is no bar
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._progress.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)


class StepBar(_Bars):
    """Bars of steps done, one for each stage, on a terminal; elsewhere nothing."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._tasks: dict[str, TaskID] = {}
        self._progress: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )

    def show(self, done: int, total: int) -> None:
        """Of the stage that this bar is called after."""
        self.show_stage(self._what, done, total)

    def show_stage(self, stage: str, done: int, total: int) -> None:
        if not self._tasks:
            self._progress.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)


class BatchBar(_Bars):
    """Requests done, tokens per second and the time left; without a terminal, a line at times."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._next_line_s = self._began_s + LINE_EVERY_S
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            self._progress = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=Console(stderr=True),
            )
        self._task: TaskID | None = None

    def show(self, batch: BatchProgress) -> None:
        if self._progress is not None:
            if self._task is None:
                self._progress.start()
                self._task = self._progress.add_task(
                    "", total=batch.num_requests, completed=batch.num_done
                )
            self._progress.update(
                self._task, completed=batch.num_done, description=self._told(batch)
            )
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + LINE_EVERY_S
            self._print(f"{batch.num_done} of {batch.num_requests} done, {self._told(batch)}")

    def end(self, batch: BatchProgress, *, num_before: int) -> None:
        """The summary. `num_before` were done before this run."""
        if self._progress is not None:
            self.show(batch)
            self._progress.stop()
        if num_before == batch.num_done == batch.num_requests:
            self._print(
                f"{batch.num_done} of {batch.num_requests} done before, nothing was to do, "
                f"{batch.num_failed} with errors"
            )
            return
        earlier = f", {num_before} of them before" if num_before else ""
        self._print(
            f"{batch.num_done} of {batch.num_requests} done{earlier}, {self._told(batch)}, "
            f"{time.monotonic() - self._began_s:.1f} s"
        )

    def _told(self, batch: BatchProgress) -> str:
        speed = batch.num_tokens / max(time.monotonic() - self._began_s, 1e-3)
        return f"{batch.num_failed} with errors, {speed:.1f} tok/s"

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Teller:
    """Tells a person on standard error what happens: a status line on a terminal, else lines."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._status = ""
        self._width = 0
        self._next_line_s = 0.0

    def say(self, text: str) -> None:
        self._clear()
        print(f"{self._elapsed():>7} {text}", file=sys.stderr, flush=True)
        self._draw()

    def show(self, text: str) -> None:
        """The status from now on; without a terminal one in ten seconds is a line."""
        if self._is_terminal:
            self._clear()
            self._status = text
            self._draw()
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + 10.0
            self.say(text)

    def end(self) -> None:
        self._clear()
        self._status = ""

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._began_s:.1f}s"

    def _clear(self) -> None:
        if self._is_terminal and self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            self._width = 0

    def _draw(self) -> None:
        if self._is_terminal and self._status:
            line = f"{self._elapsed():>7} {self._status}"[: os.get_terminal_size(2).columns - 1]
            sys.stderr.write(line)
            sys.stderr.flush()
            self._width = len(line)
