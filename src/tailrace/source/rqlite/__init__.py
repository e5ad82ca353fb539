"""rqlite as a source: clusters post their changes to an HTTP endpoint that tailrace serves.

The path of a change: `endpoint` (in the `receiver` process) → `request`, parsed and checked → `deduplication`, known or
new → `frame_builder` → the cluster's journal, and only then the answer 200.
"""
