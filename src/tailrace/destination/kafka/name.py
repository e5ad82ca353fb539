"""Names of topics: letters, digits, dots, dashes and underscores, 249 at most."""

from __future__ import annotations

import hashlib
import re

from tailrace.model.schema import TableName

LONGEST = 249
_OTHER = re.compile(r"_(?=x[0-9a-f]{2})|[^A-Za-z0-9_-]")


def legal(name: str) -> str:
    """A name in which every other character, and each dot, is `_x` and the hex digits of its bytes. Reversible."""
    return _OTHER.sub(lambda found: "".join(f"_x{byte:02x}" for byte in found[0].encode()), name)


def topic_of(pattern: str, table: TableName) -> str:
    """The topic of a table. One whose name would be too long ends with a digest of it."""
    topic = pattern.replace("{schema}", legal(table.schema)).replace("{table}", legal(table.name))
    if len(topic) <= LONGEST:
        return topic
    return f"{topic[: LONGEST - 17]}-{hashlib.sha256(topic.encode()).hexdigest()[:16]}"


def metric_name(topic: str) -> str:
    """Kafka refuses two topics whose names differ only in dots and underscores."""
    return topic.replace(".", "_")
