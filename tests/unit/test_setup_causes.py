"""Why a command of set-up failed: from what pip, uv and venv really say, word for word."""

from __future__ import annotations

import pytest

from allhands.cluster.setup.plan import Step
from allhands.cluster.setup.shell import CommandDone, Failed, cause_of

OFFLINE_PIP = """\
WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after connection broken by \
'NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7fb778e9ef50>: Failed to establish \
a new connection: [Errno -3] Temporary failure in name resolution')': /simple/mlx/
ERROR: Could not find a version that satisfies the requirement mlx==0.32.4 (from versions: none)
ERROR: No matching distribution found for mlx==0.32.4
"""
OFFLINE_UV = """\
error: Request failed after 1 retry in 1.7s
  cause: Failed to fetch: https://pypi.org/simple/mlx/
  cause: error sending request for url (https://pypi.org/simple/mlx/)
  cause: client error (Connect)
  cause: dns error
  cause: error resolving DNS
  cause: failed to lookup address information: Temporary failure in name resolution
"""
ABSENT_PIP = """\
ERROR: Could not find a version that satisfies the requirement mlx==9 (from versions: 0.32.3, 0.32.4)
ERROR: No matching distribution found for mlx==9
"""
FULL_AFTER_A_RETRY = OFFLINE_PIP.splitlines()[0] + (
    "\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
)
DEBIAN_VENV = """\
The virtual environment was not created successfully because ensurepip is not
available.  On Debian/Ubuntu systems, you need to install the python3-venv
package using the following command.

    apt install python3.11-venv

You may need to use sudo with that command.  After installing the python3-venv
package, recreate your virtual environment.

Failing command: /root/.allhands/env/bin/python3.11
"""
VENV = (
    "Error: Command '['/e/bin/python3', '-m', 'ensurepip', '--upgrade', '--default-pip']' "
    "returned non-zero exit status 1.\n"
)
NO_NETWORK = "let it reach the package index, or name a mirror in its pip.conf (for uv: uv.toml)"


@pytest.mark.parametrize(
    ("done", "text", "hint"),
    [
        (
            CommandDone(1, "", OFFLINE_PIP),
            "it cannot reach the package index: Temporary failure in name resolution "
            "(ERROR: No matching distribution found for mlx==0.32.4)",
            NO_NETWORK,
        ),
        (
            CommandDone(1, "", OFFLINE_UV),
            "it cannot reach the package index: Temporary failure in name resolution "
            "(error: Request failed after 1 retry in 1.7s)",
            NO_NETWORK,
        ),
        (
            CommandDone(
                1,
                "",
                OFFLINE_PIP.replace(
                    "[Errno -3] Temporary failure in name resolution", "what nobody knows"
                ),
            ),
            "it cannot reach the package index (ERROR: No matching distribution found for mlx==0.32.4)",
            NO_NETWORK,
        ),
        (CommandDone(1, "", ABSENT_PIP), "ERROR: No matching distribution found for mlx==9", ""),
        (
            CommandDone(1, "", FULL_AFTER_A_RETRY),
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "",
        ),
        (
            CommandDone(1, DEBIAN_VENV),
            "its Python has no ensurepip, which puts pip into an environment",
            "install it there: sudo apt install python3.11-venv",
        ),
        (
            CommandDone(1, "", VENV),
            "ensurepip of its Python does not work, which puts pip into an environment",
            "mend that Python, install uv there, or name another Python with --python",
        ),
        (
            CommandDone(1, "it is too warm today\n\nFailing command: /e/bin/python"),
            "it is too warm today",
            "",
        ),
        (CommandDone(1, "Failing command: /e/bin/python"), "Failing command: /e/bin/python", ""),
        (CommandDone(None), "no answer in time", ""),
    ],
    ids=["pip", "uv", "unknown", "absent", "full", "debian", "venv", "before", "alone", "late"],
)
def test_the_cause_is_told_and_not_what_follows_from_it(
    done: CommandDone, text: str, hint: str
) -> None:
    assert cause_of(done) == (text, hint)


def test_a_step_that_failed_has_a_remedy_in_any_case() -> None:
    step = Step("node1", "install MLX", ("pip", "install", "mlx"))
    offline, absent = (
        Failed(step, CommandDone(1, "", OFFLINE_PIP)),
        Failed(step, CommandDone(1, "", ABSENT_PIP)),
    )
    assert str(offline).startswith("install MLX: it cannot reach the package index")
    assert offline.hint == f"{NO_NETWORK}, then run this again; by hand: pip install mlx"
    assert absent.hint == "run it by hand: pip install mlx"
