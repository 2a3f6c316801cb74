"""The streamed model of a benchmark's last row: the next row uses it if only its plan and its batches differ."""
from __future__ import annotations

import abc
import argparse
import contextlib
import gc
from collections.abc import Iterator
from typing import Any, Self


class KeptModel(abc.ABC):
    """Rows with the same `COMMON` options use one model.

    State: the `model` of the last row, the options that it was `made` for, and the number of rows that `used` it."""

    COMMON: tuple[str, ...]

    def __init__(self) -> None:
        self.model: Any = None
        self.made: tuple[Any, ...] = ()
        self.used = 0

    @abc.abstractmethod
    def planned(self, given: argparse.Namespace) -> dict[str, Any]:
        """The options of a row that `replan` can change."""

    @abc.abstractmethod
    def streamed(self, given: argparse.Namespace, planned: dict[str, Any]) -> Any:
        """A new model, streamed with the options of a row."""

    def of(self, given: argparse.Namespace) -> Any:
        """The streamed model, with the plan of a row."""
        made = tuple(tuple(value) if isinstance(value := getattr(given, name), list) else value for name in self.COMMON)
        if self.model is not None and made == self.made:
            self.used += 1
            self.model.megacompile.replan(**self.planned(given))
            return self.model
        self.close()
        self.made, self.used = made, 1
        self.model = self.streamed(given, self.planned(given))
        return self.model

    @contextlib.contextmanager
    def closed_if_failed(self) -> Iterator[None]:
        """A context for the measurement of a row. If it fails, no other row uses the model."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the model, if there is one."""
        model, self.model = self.model, None
        if model is not None:
            model.megacompile.close()
        del model
        gc.collect()  # otherwise its tiles may still be there while the next model is made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
