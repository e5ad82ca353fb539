"""What other engines do to a Delta table of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable


def optimize_as_spark_does(place: Path, folder: str) -> None:
    """Put all files of a table in one, named and typed as Spark's OPTIMIZE does."""
    table = DeltaTable(str(place))
    old = pa.table(table.get_add_actions(flatten=True))
    partition = {name: old.column(f"partition.{name}")[0].as_py() for name in table.metadata().partition_columns}
    rows = table.to_pyarrow_table().drop_columns(list(partition))
    new = f"{folder}part-00000.c000.snappy.parquet"
    (place / new).parent.mkdir(exist_ok=True)
    pq.write_table(rows, place / new, use_deprecated_int96_timestamps=True)
    about = {"partitionValues": partition, "size": (place / new).stat().st_size, "dataChange": False}
    actions = [
        {"add": {"path": new, "modificationTime": 0, "stats": json.dumps({"numRecords": rows.num_rows}), **about}},
        *({"remove": {"path": path, "deletionTimestamp": 0, **about}} for path in old.column("path").to_pylist()),
    ]
    entry = place / "_delta_log" / f"{table.version() + 1:020}.json"
    entry.write_text("\n".join(json.dumps(action, ensure_ascii=False) for action in actions))
