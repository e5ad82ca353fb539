"""Which version of a table's schema a Relation message describes."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.errors import SchemaChangedError
from tailrace.schema import TableSchema
from tailrace.source.postgres.catalog_type import agrees
from tailrace.source.postgres.message import Relation


def differences(table: TableSchema, relation: Relation) -> list[str]:
    """What keeps rows of `relation` from being read as `table`, in words; empty when nothing does.

    Columns are matched by name. A change of type that leaves the Arrow type as it is makes no difference.
    """
    known = {column.name: column for column in table.columns}
    sent = {column.name: column for column in relation.columns}
    found = [f"column {name} is new" for name in sent if name not in known]
    found += [f"column {name} is gone" for name in known if name not in sent]
    found += [
        f"column {name} is no longer {column.upstream_type or column.type}"
        for name, column in known.items()
        if name in sent and not agrees(sent[name], column.type, column.upstream_type)
    ]
    return found


def choose(versions: TableSchema | Sequence[TableSchema], relation: Relation) -> TableSchema:
    """The newest of the known versions that `relation` describes. Raises SchemaChangedError when none is."""
    candidates = [versions] if isinstance(versions, TableSchema) else list(versions)
    for table in reversed(candidates):
        if not differences(table, relation):
            return table
    newest = candidates[-1]
    raise SchemaChangedError(
        f"the columns changed upstream: {'; '.join(differences(newest, relation))}",
        fix=f"tailrace resync {newest.table} copies the table again with its columns of now",
        table=str(newest.table),
    )


def check_identity(table: TableSchema, relation: Relation) -> None:
    """Raise SchemaChangedError unless old images of `relation` identify a row of `table`."""
    identity = {column.name for column in relation.columns if column.identifies}
    if table.key and set(table.key) <= identity:
        return
    if not table.key and relation.replica_identity == "f":
        return
    wanted = f"the key ({', '.join(table.key)})" if table.key else "the whole row"
    raise SchemaChangedError(
        f"the replica identity no longer covers {wanted}, so updates and deletes cannot be told apart",
        fix=f"ALTER TABLE {table.table} REPLICA IDENTITY {'DEFAULT' if table.key else 'FULL'}, "
        f"then tailrace resync {table.table}",
        table=str(table.table),
    )
