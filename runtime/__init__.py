"""Executes scheduled programs: lanes, the meaning of each op, host memory and device slots, the optimizer."""
