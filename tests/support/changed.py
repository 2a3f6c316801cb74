"""Prints the test files that belong to what has changed since the last commit: changed tests, and `test_NAME.py` of a changed
NAME.py. `make quick` runs them beside the cheap tiers.

    python tests/support/changed.py
"""
from __future__ import annotations

import subprocess
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
#: Tiers that `make quick` runs anyway, or that no run per commit has.
LEFT_OUT = {"lint", "ir", "kernels", "nightly", "gpu"}


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=TESTS.parent, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()  # nothing in a source archive, which has no history


def main() -> None:
    changed = {Path(name).name.removeprefix("test_")
               for name in (*git("diff", "--name-only", "HEAD"), *git("ls-files", "--others", "--exclude-standard"))}
    for path in sorted(TESTS.glob("*/test_*.py")):
        if path.parent.name not in LEFT_OUT and path.name.removeprefix("test_") in changed:
            print(path.relative_to(TESTS.parent))


if __name__ == "__main__":
    main()
