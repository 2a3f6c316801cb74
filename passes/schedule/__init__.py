"""Passes over programs: one in each file, each `run(program, plan) -> program`, pure."""
