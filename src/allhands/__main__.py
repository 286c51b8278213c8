"""``python -m allhands`` is the command ``allhands``."""

import signal
import sys

# Importing takes a moment: until it is over, Ctrl-C ends this process without a traceback.
_INTERRUPT = signal.signal(signal.SIGINT, signal.SIG_DFL)

from allhands.terminal import keep_going, open_closed_streams, stream_of, tell_lost_words  # noqa: E402

open_closed_streams()  # before anything else gets their numbers

from allhands.cli.main import main  # noqa: E402
from allhands.import_structures import keep_import_structures  # noqa: E402
from allhands.without_torch import leave_torch_out  # noqa: E402

# They write files, and have no handlers of their own as training has.
_WRITING = ("data", "model", "cluster", "tokenizer", "fuse", "export", "import")
# Their result is no output: it lies in files, or is another process's.
_WORK = ("train", "pretrain", "launch", "container", "serve", "dashboard")


def run() -> None:
    """Run the command line, in which Ctrl-C is an exception again; so is SIGTERM where files are half written."""
    signal.signal(signal.SIGINT, _INTERRUPT)
    if sys.argv[1:2] and sys.argv[1] in _WRITING:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if sys.argv[1:2] != ["eval"]:  # lm-evaluation-harness needs it
        leave_torch_out()
    keep_import_structures()
    # What became of a command never depends on whether its messages could be written.
    sys.stdout, sys.stderr = stream_of(1, sys.stdout), keep_going(stream_of(2, sys.stderr))
    if sys.argv[1:2] and sys.argv[1] in _WORK and "--help" not in sys.argv:
        sys.stdout = keep_going(sys.stdout)
    try:
        main()
    finally:
        tell_lost_words()


if __name__ == "__main__":
    run()
