"""Backends: how a device runs lanes, copies and events. CUDA through CuPy, and the CPU with threads."""
