// A queue pair: our ordered lane to one peer, over one endpoint. It has two lines. In the data line chunks are posted
// and retired in the order in which they were accepted. Control operations (signals, notifications) stand in a line of
// their own: a held one must not hold up chunks behind it, nor a control whose gate opens earlier; their prefix serves
// only those who cover them (scopes queue_pair and peer).
#pragma once

#include <cstdint>

#include "engine/request.hpp"
#include "engine/slots.hpp"
#include "engine/types.hpp"

namespace expertwire {

enum class OperationState : std::uint8_t {
    free = 0,
    held,      // a control whose gate is closed
    queued,    // may be posted when its turn comes
    taken,     // given out by take_posts(), its result not known yet
    posted,    // in flight
    finished,  // ended; stays in its line until everything before it has ended too
};

enum class LineKind : std::uint8_t { data = 0, control };

// A chunk or a control operation, from acceptance to retirement.
struct Operation {
    OperationState state = OperationState::free;
    OpKind kind = OpKind::write;
    LineKind line = LineKind::data;
    bool locally_done = false;  // its local buffer is reusable (Level::local reported)
    Status result = Status::pending;
    std::uint32_t request = no_index;  // owner; none once its end is accounted for
    std::uint32_t queue_pair = no_index;
    std::uint32_t gate = no_index;  // held control: its gate record
    Ticket slot;                    // while taken or posted, and in the data line until retired
    std::uint64_t position = 0;     // in its line
    std::uint64_t serial = 0;       // moment of acceptance of its request
    std::uint32_t joined = 0;       // so many behind it in its line were posted with it, as one
    std::uint32_t next_in_line = no_index;
    std::uint32_t previous_in_request = no_index;
    std::uint32_t next_in_request = no_index;
    std::uint32_t next_ready = no_index;
    EndpointId endpoint;  // control: the one that its gate was reckoned for
    RegionId local;
    std::uint64_t local_offset = 0;
    RemoteRegionId remote;
    std::uint64_t remote_offset = 0;
    std::uint64_t bytes = 0;
    std::uint64_t operand = 0;
    const std::byte* payload = nullptr;
};

// Positions count from 0. `retired`: every operation before it has ended. `posted`: none before it is still to be
// posted.
struct Line {
    std::uint32_t head = no_index;  // oldest operation that is not retired
    std::uint32_t tail = no_index;
    std::uint32_t first_unposted = no_index;  // first one not posted or ended
    std::uint32_t cursor = no_index;          // data: next one that take_posts() may give out
    std::uint64_t accepted = 0;
    std::uint64_t posted = 0;
    std::uint64_t retired = 0;
    std::uint64_t finished = 0;             // ended in any order (only the mutant count_for_prefix looks at it)
    std::uint64_t failed_until = 0;         // one past the last failed or dropped position
    std::uint32_t first_waiter = no_index;  // gates that wait for this line, by the position that they need
    std::uint32_t last_waiter = no_index;
};

// open → aborting → open(generation + 1): one request failed, the work queued behind it was aborted.
// open → quarantined → open(generation + 1): something passed the hard deadline and has drained since.
// failed: the peer or the endpoint failed; until the peer is closed and opened again.
enum class LaneState : std::uint8_t { closed = 0, open, aborting, quarantined, failed };

struct QueuePair {
    LaneState state = LaneState::closed;
    Status error = Status::ok;  // first error of this generation, latched
    std::int32_t code = 0;
    std::uint32_t generation = 1;
    PeerId peer;
    EndpointId endpoint;
    Line lines[2];
    std::uint64_t reopen_at = 0;     // aborting, quarantined: data position that must have retired
    std::uint64_t ordered_from = 0;  // class A: positions before it prove nothing by being posted (too large, a read,
                                     // or posted on an endpoint that was replaced)
    std::uint32_t ready_head = no_index;  // controls whose gate has opened, in the order in which it did
    std::uint32_t ready_tail = no_index;
    std::uint32_t ready_cursor = no_index;
    std::uint32_t bulk_window = 0;  // of a bulk lane, which is served after all others; else 0
    std::uint32_t counted = 0;      // slots that count against the window (SPEC T2)
    std::uint64_t weight = 0;       // of a bulk lane: of what is counted, against its own window
    std::uint32_t in_flight = 0;    // posted and not finished, quarantined ones included
    std::uint32_t entries = 0;      // operations accepted and not retired, both lines
    TimeNs again_since = 0;         // first AGAIN since the last accepted post
    std::uint32_t arriving = 0;     // scratch of submit(): operations that the request being checked brings
    bool overdue = false;           // scratch of step(): something on it has just passed the hard deadline
    bool pushed_back = false;       // the provider said AGAIN and has accepted nothing since
    bool dirty = false;             // in the engine's list of lanes to look at
    std::uint32_t next_dirty = no_index;

    Line& line(LineKind kind) { return lines[static_cast<std::size_t>(kind)]; }
    const Line& line(LineKind kind) const { return lines[static_cast<std::size_t>(kind)]; }
};

}  // namespace expertwire
