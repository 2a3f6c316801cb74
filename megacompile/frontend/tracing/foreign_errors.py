"""What tracing raises when it meets code that it cannot trace, and what only happens to be raised meanwhile."""
from __future__ import annotations

#: Classes of Dynamo's, AOT's and the fakes' errors (all of which are RuntimeErrors, ValueErrors or failed assertions), and of
#: what a model's own code raises when it is given fakes. A `MemoryError`, an `OSError` (`TimeoutError` is one), and whatever
#: else a user's code or signal handler raises says nothing about the model: it goes to the caller as it is.
TRACING_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ArithmeticError, NameError,
                  ImportError)
_FOREIGN = (MemoryError, OSError)


def raise_foreign(error: BaseException) -> None:
    """Raises the memory or system error that a tracing error was made of, if there is one: Dynamo wraps what it meets."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, _FOREIGN):
            raise seen
        seen = seen.__cause__ or seen.__context__
