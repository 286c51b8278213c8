"""The commands, one module each: they parse, build the configuration, call one function and print."""
