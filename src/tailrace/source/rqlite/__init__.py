"""rqlite as a source: clusters that post their changes to an endpoint of ours.

The way of a change: `endpoint` (in the `receiver`, a process) → `request`, read and checked → `deduplication`, known or
new → `frame_builder` → the cluster's journal, and only then the answer 200.
"""
