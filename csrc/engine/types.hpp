// Distinct types for everything that the core names by number, so that a peer can never be passed for a region.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>

namespace expertwire {

template <class Tag>
struct Id {
    std::uint32_t value = std::numeric_limits<std::uint32_t>::max();

    constexpr bool valid() const { return value != std::numeric_limits<std::uint32_t>::max(); }
    friend constexpr auto operator<=>(Id, Id) = default;
};

using PeerId = Id<struct PeerTag>;
using RegionId = Id<struct RegionTag>;        // a region that this process registered
using RemoteRegionId = Id<struct RemoteTag>;  // a region that a peer announced
using QueuePairId = Id<struct QueuePairTag>;  // an ordered lane, ours
using EndpointId = Id<struct EndpointTag>;    // libfabric's endpoint

// The number of a remote region is its row in a table, and above that how often the row had held another before.
constexpr std::uint32_t remote_row_bits = 20;
constexpr std::uint32_t remote_rows_max = 1u << remote_row_bits;
constexpr std::uint32_t remote_generations =
    (1u << (32 - remote_row_bits)) - 1;  // the last one is of the invalid number
constexpr std::uint32_t row_of(RemoteRegionId id) {
    return id.value & (remote_rows_max - 1);
}
constexpr std::uint32_t generation_of(RemoteRegionId id) {
    return id.value >> remote_row_bits;
}
constexpr RemoteRegionId remote_region_id(std::uint32_t row, std::uint32_t generation) {
    return {(generation << remote_row_bits) | row};
}

using TimeNs = std::uint64_t;  // time is an argument everywhere below runtime/: no clock is read there

// A slot and the generation it was reserved under. A ticket of an older generation names nothing any more.
struct Ticket {
    std::uint32_t slot = std::numeric_limits<std::uint32_t>::max();
    std::uint32_t generation = 0;

    constexpr std::uint64_t pack() const { return (std::uint64_t{generation} << 32) | slot; }
    static constexpr Ticket unpack(std::uint64_t word) {
        return {static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32)};
    }
    constexpr bool valid() const { return slot != std::numeric_limits<std::uint32_t>::max(); }
    friend constexpr auto operator<=>(Ticket, Ticket) = default;
};

// One word for how an operation stands or ended. `ok` and everything after `pending` that is not `would_block` is
// terminal. The Python exception tree (errors.py) has one class for each failure.
enum class Status : std::uint8_t {
    ok = 0,
    pending,       // not terminal yet
    would_block,   // nothing was taken: progress, then try again
    cancelled,     // cancelled before anything was posted
    aborted,       // queued behind a failed operation on the same queue pair
    peer_dead,     // declared dead: process gone, or silent for too long
    bad_key,       // stale or unknown remote region
    out_of_range,  // beyond the region
    timed_out,     // hard deadline
    refused,       // the call is not possible now (in use, still owned, closed): the message says why
    invalid,       // bad argument
    stale,         // the ticket's generation has passed
    closed,        // the endpoint was shut down
    io_error,      // the provider's own error; the code is kept beside it
};

// How far a completion reaches (SPEC T18): the local buffer may be reused, or the bytes are at the target.
enum class Level : std::uint8_t { local = 0, delivered };

enum class OpKind : std::uint8_t { write = 0, read, signal, notification };

// What a control operation waits for (SPEC T4).
enum class Scope : std::uint8_t { request = 0, queue_pair, peer };

}  // namespace expertwire
