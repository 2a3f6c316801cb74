"""Passes over programs: one a file, each `run(program, plan) -> program`, pure."""
