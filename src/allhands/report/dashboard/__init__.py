"""Runs in the browser while they go on: a small web server over what runs write down."""
