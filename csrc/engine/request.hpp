// A logical request: many chunks and control operations, one terminal record. The transition table is here, and only
// here.
#pragma once

#include <array>
#include <cstdint>

#include "engine/types.hpp"

namespace expertwire {

inline constexpr std::uint32_t no_index = 0xffffffffu;  // the null link of every intrusive list in this room

// QUEUED: nothing was posted. POSTED: something was, something is still to be. DRAINING: nothing more will be posted,
// by success or by failure; what is in flight is waited for. Only DRAINING leads to an end.
enum class RequestState : std::uint8_t { free = 0, queued, posted, draining, done, failed, cancelled };
inline constexpr std::size_t request_states = 7;

enum class RequestEvent : std::uint8_t {
    submit = 0,
    post,       // an operation was posted, others are still to be
    last_post,  // the last one was
    fail,       // the first error: what was not posted is dropped
    cancel,
    end_ok,  // nothing is in flight any more
    end_failed,
    end_cancelled,
    release,
};
inline constexpr std::size_t request_events = 9;

// The whole machine. `illegal` entries are bugs of the engine: they are counted and change nothing.
inline constexpr std::uint8_t illegal_transition = 0xff;
using RequestTable = std::array<std::array<std::uint8_t, request_events>, request_states>;

constexpr RequestTable make_request_table() {
    RequestTable table{};
    for (auto& row : table) row.fill(illegal_transition);
    const auto allow = [&table](RequestState from, RequestEvent event, RequestState to) {
        table[static_cast<std::size_t>(from)][static_cast<std::size_t>(event)] = static_cast<std::uint8_t>(to);
    };
    using S = RequestState;
    using E = RequestEvent;
    allow(S::free, E::submit, S::queued);
    allow(S::queued, E::post, S::posted);
    allow(S::queued, E::last_post, S::draining);
    allow(S::queued, E::fail, S::draining);
    allow(S::queued, E::cancel, S::draining);
    allow(S::posted, E::post, S::posted);
    allow(S::posted, E::last_post, S::draining);
    allow(S::posted, E::fail, S::draining);
    allow(S::draining, E::fail, S::draining);
    allow(S::draining, E::end_ok, S::done);
    allow(S::draining, E::end_failed, S::failed);
    allow(S::draining, E::end_cancelled, S::cancelled);
    allow(S::done, E::release, S::free);
    allow(S::failed, E::release, S::free);
    allow(S::cancelled, E::release, S::free);
    return table;
}
inline constexpr RequestTable request_table = make_request_table();

constexpr bool terminal(RequestState state) {
    return state >= RequestState::done;
}

struct Request {
    RequestState state = RequestState::free;
    Level level = Level::delivered;
    Status first_error = Status::ok;  // latched: the first one wins
    std::int32_t code = 0;            // the provider's number behind first_error
    PeerId peer;
    std::uint64_t serial = 0;       // the engine's moment of acceptance (Engine::quiet_mark)
    std::uint32_t unposted = 0;     // operations not posted yet
    std::uint32_t outstanding = 0;  // operations whose end is not accounted for yet
    std::uint32_t local_left = 0;   // Level::local: operations whose local buffers are not reusable yet
    std::uint32_t first_operation = no_index;
    std::uint32_t previous = no_index;  // live requests of the peer, in order of acceptance
    std::uint32_t next = no_index;
    std::uint32_t next_failing = no_index;  // worklist of requests whose unposted operations are to be dropped
    bool in_failing_list = false;
    bool signalled = false;  // a control of it was posted
    bool counted = false;    // class C: its signal leaves when its writes are posted, and the target counts them
};

// One 64-bit word per request: generation << 32 | first error << 16 | flags << 8 | status. The status is `pending`
// until it is terminal; then the word is stored once more, with release order, after everything else.
struct RecordView {
    std::uint32_t generation = 0;
    Status first_error = Status::ok;  // seen before the request is terminal: it is draining
    std::uint8_t flags = 0;
    Status status = Status::pending;

    static constexpr std::uint8_t stalled = 1;      // a wait for it passed its deadline; ownership did not change
    static constexpr std::uint8_t quarantined = 2;  // it passed the hard deadline with work in flight

    constexpr std::uint64_t pack() const {
        return (std::uint64_t{generation} << 32) | (std::uint64_t{static_cast<std::uint8_t>(first_error)} << 16) |
               (std::uint64_t{flags} << 8) | static_cast<std::uint8_t>(status);
    }
    static constexpr RecordView unpack(std::uint64_t word) {
        return {static_cast<std::uint32_t>(word >> 32), static_cast<Status>((word >> 16) & 0xff),
                static_cast<std::uint8_t>((word >> 8) & 0xff), static_cast<Status>(word & 0xff)};
    }
    constexpr bool is_terminal() const { return status != Status::pending; }
};

}  // namespace expertwire
