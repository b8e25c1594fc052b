"""How far the run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LINE_SECONDS = 10.0


class ProgressReporter:
    """Shows loss, tokens per second and the time left. One process shows it (rank 0).

    Args:
        mode: "auto" (a bar on a terminal, lines elsewhere), "bar", "lines" or "off".
        steps: optimizer steps of the whole run.
        done: steps that earlier sittings did.
        console: where to; by default standard output.
        clock: seconds, from anywhere.
    """

    def __init__(self, mode: str, steps: int, done: int = 0, *, console: Console | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console()
        self.mode = ("bar" if self.console.is_terminal else "lines") if mode == "auto" else mode
        self._steps, self._first, self._clock = steps, done, clock
        self._started, self._last_line, self._last_wait = clock(), -LINE_SECONDS, 0.0
        self._text = ""
        self._timed = False
        self._bar: Progress | None = None
        if self.mode == "bar":
            count, text = "step {task.completed:.0f}/{task.total:.0f}", "{task.fields[text]}"
            self._bar = Progress(TextColumn(count), BarColumn(), TextColumn(text), console=self.console)
            self._task = self._bar.add_task("", total=steps, completed=done, text="")
            self._bar.start()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show the state after step ``step``. Lines come at most every ``LINE_SECONDS``, but the last always does."""
        if not self._timed:  # what came before the first step (reading, a first evaluation) says nothing of the pace
            self._timed, self._first, self._started = True, step, self._clock()
        text = self._text = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {self._left(step)}".rstrip()
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif self.mode == "lines":
            now = self._clock()
            if now - self._last_line >= LINE_SECONDS or step >= self._steps:
                self._last_line = now
                self._line(f"step {step}/{self._steps}  {text}")

    def waiting(self, what: str, done: int, count: int) -> None:
        """Show how far something between two steps is, from 0 to ``count``. As lines it is told only once it takes
        ``LINE_SECONDS``."""
        text, now = f"{what} {done}/{count}", self._clock()
        if self._bar is not None:
            self._bar.update(self._task, text=text if done < count else self._text)
        elif self.mode == "lines":
            if done == 0:
                self._last_wait = now
            elif done < count and now - self._last_wait >= LINE_SECONDS:
                self._last_wait = now
                self._line(text)

    def note(self, text: str) -> None:
        """Show a line beside the bar (an evaluation, a checkpoint); nothing when progress is off."""
        if self.mode != "off":
            self._line(text)

    def tell(self, text: str) -> None:
        """Show a line in any case: a warning, or how the run ended."""
        self._line(text)

    def close(self) -> None:
        """Leave the bar as it is; may be called again."""
        if self._bar is not None:
            self._bar.stop()

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _left(self, step: int) -> str:
        """The time left at this sitting's pace, evaluations and checkpoints included."""
        done, left = step - self._first, self._steps - step
        if done <= 0 or left <= 0:
            return "done" if left <= 0 else ""
        seconds = int((self._clock() - self._started) / done * left)
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}:{minutes:02d}:{seconds % 60:02d} left" if hours else f"{minutes}:{seconds % 60:02d} left"
