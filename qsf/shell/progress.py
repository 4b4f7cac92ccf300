"""Progress of commands that work for minutes: a bar on a terminal, lines elsewhere."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import TYPE_CHECKING

from qsf.errors import error_line
from qsf.shell import command

if TYPE_CHECKING:
    from rich.progress import Progress

PROGRESS_LINES = "QSF_PROGRESS_LINES"  # if set, ProgressLine prints lines of JSON for a program
_REDRAW_S = 0.1
_WRITE_S = 0.3
_RATE_S = 60.0  # the speed is averaged over this time at least, so that the estimate is steady


class _Remaining:
    """Estimates how long a task still takes, from how fast it was lately."""

    def __init__(self, now: float) -> None:
        self._started = self._at = self._estimated = now
        self._fraction = 0.0
        self._done = self._passed_s = 0.0  # old parts fade alike: no short step spoils the speed
        self._left_s: float | None = None

    def seconds(self, fraction: float, now: float) -> float | None:
        """Return the time left, small corrections by quarters; None: nothing was done yet."""
        passed_s, done = now - self._at, fraction - self._fraction
        if passed_s > 0 and done > 0:
            kept = math.exp(-passed_s / max(_RATE_S, (now - self._started) / 4))
            self._done = kept * self._done + done
            self._passed_s = kept * self._passed_s + passed_s
            self._at, self._fraction = now, fraction
        if self._done == 0:
            return None
        left_s = (1 - fraction) * self._passed_s / self._done
        due_s = left_s if self._left_s is None else self._left_s - (now - self._estimated)
        if abs(left_s - due_s) < 0.1 * left_s:
            left_s = due_s + (left_s - due_s) / 4
        self._left_s, self._estimated = left_s, now
        return left_s


class _Bar:
    """A bar on a terminal, removed at the end; elsewhere a line at every 10 %."""

    def __init__(self, text: str, *, enabled: bool) -> None:
        self._enabled = enabled
        self._started = time.monotonic()
        self._remaining = _Remaining(self._started)
        self._drawn = 0.0
        self._shown_tenths = 0
        self._bar: Progress | None = None
        if enabled and sys.stderr.isatty():
            self._open(text)

    def _open(self, text: str) -> None:
        # Imported late: rich takes 6 MB, which would count in the budget of qsf eval.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        # Drawn by `update` alone: rich's own thread would disturb measurements.
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(24),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._task = bar.add_task(text, total=1.0, numbers="")
        self._bar = bar
        bar.start()

    def update(self, fraction: float, numbers: str = "") -> None:
        if not self._enabled:
            return
        now = time.monotonic()
        words = [f"{int(100 * fraction):3d}%"]
        left_s = self._remaining.seconds(fraction, now)
        if left_s is not None and now - self._started > 1:
            words.append(f"{duration_text(left_s)} left")
        words += [numbers] if numbers else []
        if self._bar is not None:
            if now - self._drawn >= _REDRAW_S or fraction in (0.0, 1.0):
                self._drawn = now
                self._bar.update(self._task, completed=fraction, numbers=", ".join(words))
                self._bar.refresh()
        elif int(fraction * 10) > self._shown_tenths:
            self._shown_tenths = int(fraction * 10)
            _print(f"  {', '.join(words).strip()}")

    def close(self) -> None:
        self._enabled = False
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


class ProgressLine:
    """Shows the progress of one task.

    Args:
        enabled: show anything at all.
        unit: what is counted, such as "MB" or "tokens".
        scale: how many counts of ``update`` make one unit.
    """

    def __init__(self, *, enabled: bool, unit: str, scale: float = 1) -> None:
        self._unit, self._scale = unit, scale
        self._started = time.monotonic()
        self._written = 0.0
        self._is_json = enabled and bool(os.environ.get(PROGRESS_LINES))
        self._bar = _Bar("", enabled=enabled and not self._is_json)

    def update(self, done: float, total: float) -> None:
        now = time.monotonic()
        if self._is_json and (now - self._written > _WRITE_S or done >= total):
            self._written = now
            facts = {"unit": self._unit, "completed": int(done), "total": int(total)}
            _print(json.dumps(facts))
        elapsed_s = max(now - self._started, 1e-3)
        self._bar.update(
            done / total if total else 1.0,
            f"{done / self._scale:.0f} of {total / self._scale:.0f} {self._unit}, "
            f"{done / elapsed_s / self._scale:.0f} {self._unit}/s",
        )

    def close(self) -> None:
        """Leave the terminal's cursor at the start of a new line; shows nothing afterwards."""
        self._bar.close()


class Steps:
    """Shows one step after another, each with its own bar. Warnings are always shown."""

    def __init__(self, *, enabled: bool, program: str) -> None:
        """Set the name before warnings; shows nothing yet."""
        self._enabled = enabled
        self._program = command.typed(program)
        self._bar = _Bar("", enabled=False)

    def begin(self, step: str) -> None:
        self._bar.close()
        if self._enabled and not sys.stderr.isatty():
            _print(step)
        self._bar = _Bar(step, enabled=self._enabled)
        self._bar.update(0.0)

    def update(self, fraction: float, text: str = "") -> None:
        self._bar.update(fraction, text)

    def warn(self, text: str) -> None:
        self._bar.close()
        _print(f"{self._program}: {error_line(text)}")

    def close(self) -> None:
        """Leave a clean line; shows only warnings afterwards."""
        self._enabled = False
        self._bar.close()


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def duration_text(seconds: float) -> str:
    """Return a duration for people: ``12 s``, ``3 min 05 s``, ``2 h 01 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
