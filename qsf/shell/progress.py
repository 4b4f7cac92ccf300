"""What the commands that work for minutes show meanwhile: how far they are, how fast, how long."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
import time

_BAR_WIDTH = 24
_REDRAW_S = 0.1


class ProgressLine:
    """Shows how far something is: a bar on a terminal, else a line at every 10 %.

    Args:
        enabled: show anything at all.
        unit: what is counted, such as "MB" or "tokens".
        scale: how many of what ``update`` is told make one unit.
    """

    def __init__(self, *, enabled: bool, unit: str, scale: float = 1) -> None:
        """Start the clock; see the class."""
        self._enabled = enabled
        self.unit = unit
        self._scale = scale
        self._is_terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._drawn = 0.0
        self._shown_tenths = 0
        self._is_open = False

    def update(self, done: float, total: float) -> None:
        """Show that ``done`` of ``total`` are through."""
        if not self._enabled:
            return
        now = time.monotonic()
        elapsed_s = max(now - self._started, 1e-3)
        fraction = done / total if total else 1.0
        left_s = elapsed_s * (1 - fraction) / fraction if fraction else 0.0
        numbers = (
            f"{fraction:4.0%}  {done / self._scale:.0f} of {total / self._scale:.0f} {self.unit}, "
            f"{done / elapsed_s / self._scale:.0f} {self.unit}/s, {duration_text(left_s)} left"
        )
        if self._is_terminal:
            if now - self._drawn >= _REDRAW_S or done == total:
                bar = "#" * int(fraction * _BAR_WIDTH)
                sys.stderr.write(f"\r[{bar:<{_BAR_WIDTH}}] {numbers}\x1b[K")
                sys.stderr.flush()
                self._drawn = now
                self._is_open = True
        elif int(fraction * 10) > self._shown_tenths:
            self._shown_tenths = int(fraction * 10)
            sys.stderr.write(numbers.strip() + "\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Leave the terminal's cursor at the start of a fresh line; nothing is shown after it."""
        self._enabled = False
        if self._is_open:
            self._is_open = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def duration_text(seconds: float) -> str:
    """Return a duration as people say it: ``12 s``, ``3 min 05 s``, ``2 h 01 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
