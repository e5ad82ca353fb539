"""Changelogs in Parquet files, with a log of batches that makes them exact: what the destination `parquet` writes and
the source `tape` reads.

    <path>/<schema>/<table>/<number>-<n>.parquet    the changes of one table at one version in one batch
    <path>/_tailrace/log/<number>.json              a batch: its files, in the order of the upstream's commits
    <path>/_tailrace/tables/<table>/<number>.json   a version of a table, from that batch on

A file counts once the entry of its batch is there. Entries are numbered from 1 without a gap, each is put where there
is none, and none changes: a batch that is written again finds its own, another writer's stops this one.
"""
