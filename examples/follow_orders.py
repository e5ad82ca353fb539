"""Follow one table as a typed Spark stream: revenue by currency, from the changes themselves.

SHOP_DSN=postgresql://… python examples/follow_orders.py examples/shop.yaml
"""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn


def orders(spark: SparkSession, config: str) -> DataFrame:
    """Every change of `public.orders`: its columns, typed, and what happened in `_tailrace_op`."""
    return spark.readStream.format("tailrace").option("config", config).option("table", "public.orders").load()


def revenue(changes: DataFrame) -> DataFrame:
    """The number and the sum of new orders, by currency."""
    placed = changes.where(fn.col("_tailrace_op").isin("read", "insert"))
    return placed.groupBy("currency").agg(fn.count("*").alias("orders"), fn.sum("total").alias("total"))


def main(config: str) -> None:
    spark = SparkSession.builder.master("local[2]").appName("follow orders").getOrCreate()
    query = revenue(orders(spark, config)).writeStream.outputMode("complete").format("console").start()
    query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1])
