"""Several computers: how ranks are started, watched, stopped and started again, and what keeps them
from it.
"""
