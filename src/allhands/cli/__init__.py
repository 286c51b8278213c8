"""The commands, one module each: parse, build the configuration, call one function, print."""
