"""The computer: processor and GPU, native code, memory, ports, versions, and injected faults."""
