"""Executes scheduled programs: host memory, device slots, lanes, and the meaning of each op."""
