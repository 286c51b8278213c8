"""Models: loaded, adapted, quantised, made anew, and the ordered passes that change their modules."""
