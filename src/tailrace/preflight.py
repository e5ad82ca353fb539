"""Is everything ready for a pipeline? What `tailrace check` prints and `tailrace run` looks at first."""

from __future__ import annotations

from tailrace.destination import Destination
from tailrace.errors import Finding
from tailrace.source import Source


def check(source: Source, destination: Destination) -> list[Finding]:
    """Everything the source and the destination find. Nothing is changed there."""
    findings = source.check()
    # The tables of a source that is not ready cannot be asked for; where they would go can be looked at all the same.
    ready = not any(finding.level == "error" for finding in findings)
    return findings + destination.check(source.tables() if ready else None)
