"""Runs in the browser while they go on: a small web server that reads the files of runs."""
