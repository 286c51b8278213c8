"""``python -m allhands`` is the command ``allhands``."""

import signal
import sys
from collections.abc import Sequence

from allhands.io.terminal import keep_going, open_closed_streams, stream_of, tell_lost_words

open_closed_streams()  # before anything else gets their numbers

from allhands.cli.main import main  # noqa: E402
from allhands.runtime.blas import preload_blas  # noqa: E402
from allhands.runtime.command import exit_at_term, interrupt_raises, keep_interrupts  # noqa: E402
from allhands.runtime.jit_cache import prepare_process  # noqa: E402
from allhands.runtime.libraries import leave_torch_out  # noqa: E402

# They write files, and have no handlers of their own as training has.
_WRITING = ("data", "model", "cluster", "tokenizer", "fuse", "export", "import")
# Their result is no output: it lies in files, or is another process's.
_WORK = ("train", "pretrain", "launch", "container", "serve", "dashboard")
# Verbs that load MLX or transformers in this very process. Training and evaluation do that in their
# ranks.
_LOADS = frozenset(
    (
        *(
            "chat",
            "compare",
            "data",
            "demo",
            "env",
            "export",
            "fuse",
            "generate",
            "import",
            "model",
            "plan",
            "serve",
        ),
        *("tokenizer", "upload"),
    )
)


def run() -> None:
    """Run the command line, which answers Ctrl-C from then on; and SIGTERM where files are half
    written.
    """
    arguments = sys.argv[1:]
    if arguments and arguments[0] in _WRITING:
        exit_at_term()
    prepare_process()
    if loads_mlx(arguments):
        preload_blas()
        leave_torch_out()
    # What became of a command never depends on whether its messages could be written.
    sys.stdout, sys.stderr = stream_of(1, sys.stdout), keep_going(stream_of(2, sys.stderr))
    if arguments and arguments[0] in _WORK and "--help" not in arguments:
        sys.stdout = keep_going(sys.stdout)
    try:
        interrupt_raises()
        keep_interrupts()
        main()
    except KeyboardInterrupt:  # at main's very first or last step
        sys.exit(128 + signal.SIGINT)
    finally:
        tell_lost_words()


def loads_mlx(arguments: Sequence[str]) -> bool:
    """Return whether this command makes the process load MLX or transformers, so that it must be
    prepared first.
    """
    return bool(_LOADS.intersection(arguments[:1])) and "--help" not in arguments


if __name__ == "__main__":
    run()
