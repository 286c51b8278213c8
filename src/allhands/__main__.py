"""``python -m allhands`` is the command ``allhands``."""

import signal

# Importing takes a moment: until it is over, Ctrl-C ends this process without a traceback.
_INTERRUPT = signal.signal(signal.SIGINT, signal.SIG_DFL)

from allhands.cli.main import main  # noqa: E402


def run() -> None:
    """Run the command line, in which Ctrl-C is an exception again."""
    signal.signal(signal.SIGINT, _INTERRUPT)
    main()


if __name__ == "__main__":
    run()
