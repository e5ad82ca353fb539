"""Commands and single runs in the process of the test, where nothing is killed, signalled or read while it runs.

A process of its own costs the imports, and for a run the start of Spark; here both are paid once for all tests.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from typer.testing import CliRunner, Result

from tailrace.cli import app


def invoke(*arguments: object) -> Result:
    """`tailrace ARGUMENTS` to its end."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def apply(file: Path, *, errored: Collection[str] = ()) -> None:
    """What `tailrace run FILE --once` does. Exactly the tables `errored` are in error at its end."""
    # Imports Spark, which commands do without.
    from tailrace.stream.pipeline import Pipeline

    pipeline = Pipeline.from_file(file)
    pipeline.run(once=True)
    found = {table.name: table.reason for table in pipeline.status().errored}
    assert set(found) == set(errored), found
