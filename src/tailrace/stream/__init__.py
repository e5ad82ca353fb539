"""The Spark stream of a pipeline: plans batches, reads them in tasks, writes them and records the progress."""
