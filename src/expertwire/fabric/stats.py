"""What an endpoint counts, as one immutable record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of one endpoint's counters. Counts grow from 0; the rest says how things stand at the call.

    Requests: `requests_*`; `submissions_pushed_back` were told to wait because a table was full. Operations (chunks and signals):
    `operations_*`; `posts_again` the provider had no room and the engine kept them in order; `controls_held` signals that had to wait for
    the writes before them, `gates_closed` those that wait now. `completions_stale` and `completions_unknown` named nothing alive and
    changed nothing. `slots_short`: fewer submission slots than queue pairs in use, so independence holds only up to the hard deadline.
    `endpoints_replaced`: the endpoint held too much work that no longer ends, or a peer with such work was removed;
    `replacements_failed` of them could not be done.
    """

    requests_submitted: int
    requests_done: int
    requests_failed: int
    requests_cancelled: int
    requests_live: int
    submissions_pushed_back: int
    operations_posted: int
    operations_finished: int
    operations_failed: int
    operations_dropped: int
    operations_queued: int
    posts_again: int
    posts_rejected: int
    completions_stale: int
    completions_unknown: int
    controls_held: int
    gates_closed: int
    lanes_reopened: int
    quarantines: int
    misuses: int
    slots_used: int
    slots_counted_peak: int
    slots_quarantined: int
    queue_pairs_live: int
    window: int
    slots_short: bool
    provider_posted: int
    provider_again: int
    provider_completed: int
    provider_failed: int
    provider_unattributed_errors: int
    provider_dropped_messages: int
    provider_signals_applied: int
    turns: int
    notifications: int
    notifications_dropped: int
    pulses_sent: int
    endpoints_replaced: int
    replacements_failed: int
    thread_sleeps: int
    thread_failures: int
    regions: int
    region_bytes: int
    peers: int
    remote_regions: int

    @classmethod
    def from_native(cls, rows: Mapping[str, int]) -> Statistics:
        """From the core's `statistics()`."""
        values: dict[str, Any] = {item.name: rows[item.name] for item in fields(cls)}
        return cls(**{**values, "slots_short": bool(values["slots_short"])})
