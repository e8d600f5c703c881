"""Signals that come before the server listens: while the model is loading, and once all is over."""

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def ended_by_signals() -> Generator[None, None, None]:
    """Make SIGTERM and SIGINT end the program with exit code 0, wherever it is; afterwards they do nothing.

    Where an error ends it, nothing has been served, and they do what they did before. An event loop that handles the
    signals itself takes them over. To be used in the main thread.
    """
    came = False
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal came
        del number, frame
        if not came:
            came = True
            say("kvist: shutting down")
        raise SystemExit(0)

    for number in _SIGNALS:
        signal.signal(number, end)
    try:
        yield
    except Exception:
        for number, handler in before.items():
            # None where another library than Python's has set it.
            if handler is not None:
                signal.signal(number, handler)
        raise
    except BaseException:
        ignore_signals()
        raise
    ignore_signals()


def ignore_signals() -> None:
    """Ignore both from now on: what is left takes a moment and must not be cut short."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def say(line: str) -> None:
    """Tell whoever started the program."""
    print(line, file=sys.stderr, flush=True)
