"""Local paths that the driver shares with its executors: on a cluster every machine must see them."""

from __future__ import annotations

from tailrace.destination import Destination
from tailrace.errors import Finding
from tailrace.source.source import Source


def is_local(master: str) -> bool:
    """Whether executors are on the driver's machine."""
    return master.startswith("local")


def shared_path_findings(source: Source, destination: Destination, master: str) -> list[Finding]:
    """A warning for each path that executors on other machines must see, by what is kept there. Pure."""
    if is_local(master):
        return []
    paths = {**source.local_paths(), **destination.local_paths()}
    return [
        Finding(
            "warning",
            what,
            f"every executor must see {path}, and executors of {master} may be other machines",
            f"mount {path} at the same path on every machine" + _INSTEAD.get(what, ""),
        )
        for what, path in sorted(paths.items())
    ]


_INSTEAD = {
    "journal": ", or keep the journal in an object store: source.journal.path: s3://BUCKET/PREFIX",
    "lake": ", or keep the lake in an object store: destination.path: s3://BUCKET/PREFIX",
}
