"""What the edits of the sabotage came to is printed at the end of a run."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

#: Under this name tests leave their counts in their reports, which pytest brings together from its workers.
PROPERTY = "sabotage"


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """What a test counts is added up over all tests and printed."""
    counts: Counter[str] = Counter()
    yield counts
    request.node.user_properties.append((PROPERTY, dict(counts)))  # a report from a worker holds plain types alone


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    total: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, counts in getattr(report, "user_properties", ()) if getattr(report, "when", "") == "teardown" else ():
                if name == PROPERTY:
                    total.update(counts)
    if total:
        terminalreporter.section("sabotage")
        width = max(map(len, total))
        for what, count in sorted(total.items()):
            terminalreporter.write_line(f"{what:<{width}}  {count:>7}")
