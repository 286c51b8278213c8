"""Kind of this process: the command ``allhands``, one of its helpers, or a person's own program.

This module is imported before all others, so it imports only modules that Python has loaded at its
start.
"""

from __future__ import annotations

import os
import signal
import sys
import time

_COMMAND = "allhands"
_AGAIN_S = 0.02
_ECHO_S = 0.5
_CALLS_A_PROGRAM = "allhands.loops.starting"  # the module of a rank that calls a person's function


def is_command() -> bool:
    """True if this process is a command of allhands or one of its helpers, not a person's program.

    A command knows whether it will compute. A program may compute as soon as it has imported
    allhands.
    """
    return _module() not in (None, _CALLS_A_PROGRAM)


def end_by_interrupt() -> None:
    """Let Ctrl-C end the command ``allhands`` without a traceback, until :func:`interrupt_raises`.

    Other processes stay as they are. A command that ignores Ctrl-C, for example in the background
    of a script, goes on to ignore it.
    """
    if _module() == _COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt_raises() -> None:
    """Undo :func:`end_by_interrupt`: Ctrl-C raises ``KeyboardInterrupt`` again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def keep_interrupts() -> None:
    """Raise ``KeyboardInterrupt`` again in the main thread if Python could only print it.

    A signal may arrive in a callback that cannot raise, such as that of a weak reference. Python
    would print the exception, and go on as if nothing had happened.
    """
    before = sys.unraisablehook

    def hook(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is not KeyboardInterrupt:
            before(lost)
            return
        import threading

        again = threading.Timer(_AGAIN_S, _interrupt_main_thread)
        again.daemon = True
        again.start()

    sys.unraisablehook = hook


class Echoes:
    """Recognises a signal that one sender sends twice.

    ``timeout`` sends SIGTERM to its command and then to the command's group, and schedulers send it
    to a launcher that passes it on. Ctrl-C has no echo: a person may press it twice quickly.
    """

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}

    def has(self, number: int) -> bool:
        """Return whether this signal repeats an equal one of the last half second."""
        if number == signal.SIGINT:
            return False
        now = time.monotonic()
        if now - self._heard.get(number, -_ECHO_S) < _ECHO_S:
            return True
        self._heard[number] = now
        return False


def exit_at_term() -> None:
    """Let SIGTERM end this process with exit code 143, so that it removes what is half written."""
    echoes = Echoes()

    def end(number: int, _frame: object) -> None:
        if not echoes.has(number):
            sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _interrupt_main_thread() -> None:
    """Raise ``KeyboardInterrupt`` in the main thread without a signal; a rank would count a signal
    as a second Ctrl-C.
    """
    import ctypes
    import threading

    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(threading.main_thread().ident or 0), ctypes.py_object(KeyboardInterrupt)
    )


def _module() -> str | None:
    """Return the module of allhands that Python runs as this process; ``None`` if it runs something
    else.
    """
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # while Python looks for the module
        following = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
        module = following[0] if following else ""
    elif os.path.basename(program) == _COMMAND:
        module = _COMMAND
    else:
        # Not by way of the working directory, which may be gone.
        source = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
        inside = program.removeprefix(source) if program.startswith(source) else ""
        module = os.path.splitext(inside)[0].replace(os.sep, ".")
    module = module.removesuffix(".__main__")
    return module if module.partition(".")[0] == _COMMAND else None
