"""Registers `spark.readStream.format("tailrace")` in every Spark session where tailrace is installed.

Spark imports every module called `pyspark_…` when a session first uses a Python data source. So this module imports
nothing heavy until a stream is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from tailrace.stream.change_stream import StreamRequest


class DefaultSource(DataSource):
    """The changes of a pipeline's source.

    Options: `config`, the path of the pipeline's YAML file; `table`, e.g. `public.orders`, for that table's typed
    columns (without it every change comes as JSON); `reader`, the name of this stream's cursor in the journal, needed
    when several streams read the same pipeline; `from`, a batch, a position or a time at which a new stream of a tape
    begins.
    """

    @classmethod
    def name(cls) -> str:
        return "tailrace"

    def schema(self) -> StructType:
        return self._request().schema()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return self._request().open_reader()

    def _request(self) -> StreamRequest:
        from tailrace.stream.change_stream import StreamRequest

        return StreamRequest.of(self.options)
