"""Python's start on a simulated Mac: this directory comes first in ``PYTHONPATH``, also in children."""

import mac_metal
import mac_system

mac_system.install()
mac_metal.install()
