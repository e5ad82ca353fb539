"""rqlite as a source: clusters that post their changes to an endpoint of ours.

The way of a change: `endpoint` (in the `receiver`, a process) → `entry`, read and checked → `window`, known or new →
`frame` → the cluster's journal, and only then the answer 200.
"""
