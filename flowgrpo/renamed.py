"""Names of an earlier version that are still read, and never written: metrics and the keys of JSON records.

Settings of a run, and their flags, carry their old name at their declaration (`setting(..., was="old_name")`).
"""

METRICS: dict[str, str] = {}  # old -> new, of metrics.jsonl and timings.jsonl
RECORD_KEYS: dict[str, str] = {}  # old -> new, of recorded trajectories (one JSON object a line)
