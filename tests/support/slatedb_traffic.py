"""A writer as a process of its own: `python -m tests.support.slatedb_traffic STORE SEED WRITES MIN_AGE`.

It writes at random until it is killed or fenced, or has done so many writes (0: no end); then it closes the database.
Its garbage collector deletes WAL files of that age.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import sys
from typing import Any

from tailrace.option.table import TableOptions
from tailrace.source.slatedb import merge_operator
from tailrace.source.slatedb.object_store import binding

api = binding()

MAPPING: dict[str, Any] = {
    "settings": {
        "slatedb.counter": {"mapping": {"prefix": "c:", "key": "utf8", "value": "int64", "merge": "sum"}},
        "slatedb.user": {
            "mapping": {
                "prefix": "u:",
                "key": {"id": "uint64"},
                "value": "json",
                "columns": {"name": "string", "age": "int64"},
            }
        },
    }
}
TABLES = TableOptions.model_validate(MAPPING)
FOLDS = {b"c:": merge_operator.make("sum", "int64")}
SHORT_MILLIS = 1_500
_SETTINGS = {
    "flush_interval": '"20ms"',
    "l0_sst_size_bytes": "100000",
    "l0_max_ssts": "500",
    "l0_max_ssts_per_key": "500",
    "compactor_options.poll_interval": '"500ms"',
    "garbage_collector_options.wal_options.interval": '"500ms"',
}


async def open_writer(store: str, min_age: str) -> Any:
    builder = api.ObjectStoreBuilder(api.ObjectStoreType.LOCAL)
    builder.with_config("local_path", store)
    settings = api.Settings.default()
    for key, value in _SETTINGS.items():
        settings.set(key, value)
    settings.set("garbage_collector_options.wal_options.min_age", json.dumps(min_age))
    opening = api.DbBuilder("db1", builder.build())
    opening.with_settings(settings)
    opening.with_merge_operator(merge_operator.for_reader(FOLDS))
    return await opening.build()


async def write_one(database: Any, chance: random.Random) -> Any:
    number = chance.randint(0, 400)
    match chance.randint(0, 6):
        case 0 | 1:
            return await database.put(b"k%d" % number, chance.randbytes(20))
        case 2:
            return await database.delete(b"k%d" % number)
        case 3:
            ttl = api.Ttl.EXPIRE_AFTER_MILLIS(chance.choice([SHORT_MILLIS, 3_600_000]))
            return await database.put_with_options(b"k%d" % number, b"ttl", api.PutOptions(ttl=ttl), api.WriteOptions())
        case 4:
            return await database.merge(b"c:%d" % (number % 20), struct.pack(">q", number - 200))
        case 5:
            batch = api.WriteBatch()
            for key in range(number, number + 10):
                batch.put(b"u:" + struct.pack(">Q", key), b'{"name": "n%d", "age": %d}' % (chance.randint(0, 9), key))
            batch.delete(b"u:" + struct.pack(">Q", number + 10))
            return await database.write(batch)
        case _:
            return await database.delete(b"u:" + struct.pack(">Q", number))


async def main(store: str, seed: int, writes: int, min_age: str) -> None:
    chance = random.Random(seed)
    database = await open_writer(store, min_age)
    done = 0
    while not writes or done < writes:
        handle = await write_one(database, chance)
        done += 1
        if done % 50 == 0:
            await handle.await_durable()
            print(done, flush=True)
    await database.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
