"""How figures are printed, and a benchmark ended."""

from __future__ import annotations

import signal
import sys
from statistics import median


def verdict(ratios: list[float], least: float | None = None, most: float | None = None) -> list[str]:
    """The median, the span of the rounds, what is wanted, and whether that holds."""
    ratio = median(ratios)
    wanted = f">= {least:g} x" if least is not None else f"<= {most:g} x" if most is not None else ""
    held = (least is None or ratio >= least) and (most is None or ratio <= most)
    return [f"{ratio:.2f} x", f"{min(ratios):.2f} to {max(ratios):.2f}", wanted, ("no", "yes")[held] if wanted else ""]


def heading(text: str) -> None:
    print(f"\n### {text}\n")


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def end(number: int, _: object) -> None:
    """The servers have to be ended, too: once."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit("ended by a signal")
