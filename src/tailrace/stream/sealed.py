"""Something that travels pickled and is opened where it is used."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Generic, TypeVar

from pyspark import cloudpickle

T = TypeVar("T")


@dataclass(frozen=True)
class Pickled(Generic[T]):
    """A value on its way to a task. Processes that only pass it on are spared its imports, which take them longer and
    more memory than all else they do."""

    content: bytes

    @classmethod
    def of(cls, value: T) -> Pickled[T]:
        return cls(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]

    def open(self) -> T:
        """The value; each call gives another copy."""
        value: T = pickle.loads(self.content)  # noqa: S301 - sealed by the same pipeline
        return value
