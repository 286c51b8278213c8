"""Several computers: how ranks are started, watched, stopped and started again, and how to find
what prevents this.
"""
