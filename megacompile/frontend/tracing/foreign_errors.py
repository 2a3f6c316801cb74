"""Which errors mean that code cannot be traced, and which are unrelated errors that happen during a trace."""
from __future__ import annotations

#: Classes of Dynamo's, AOT's and the fakes' errors (all of which are RuntimeErrors, ValueErrors or failed assertions), and of
#: what a model's own code raises when it is given fakes. A `MemoryError`, an `OSError` (`TimeoutError` is one), and whatever
#: else a user's code or signal handler raises says nothing about the model: it goes to the caller as it is.
TRACING_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ArithmeticError, NameError,
                  ImportError)
_FOREIGN = (MemoryError, OSError)


def raise_foreign(error: BaseException) -> None:
    """Raises the memory or system error that caused a tracing error, if there is one: Dynamo wraps every error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, _FOREIGN):
            raise seen
        seen = seen.__cause__ or seen.__context__
