"""Platforms and schedulers: Vertex AI, SageMaker, Kubernetes and Slurm.

In each module ``launch`` (``indexed_job`` for Kubernetes) returns the place of a process that the
platform has started as one of several. ``platform`` returns the paths and deadlines of the
platform, for ranks of any launcher. Both return ``None`` on another platform.
"""
