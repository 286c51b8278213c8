"""The computer below: processor and GPU, native code, ports, versions, and faults for tests."""
