// What passes between the engine and whatever posts for it: post commands out, post results and completions in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/types.hpp"

namespace expertwire {

// One operation, as the engine hands it over. `ticket` comes back in its completion.
struct PostCommand {
    Ticket ticket;
    OpKind kind = OpKind::write;
    Level level = Level::delivered;
    EndpointId endpoint;
    PeerId peer;
    RegionId local;                      // write: source; read: destination; unused by a signal
    std::uint64_t local_offset = 0;      // bytes
    RemoteRegionId remote;               // write, signal: target; read: source
    std::uint64_t remote_offset = 0;     // bytes; a signal's is 8-byte aligned
    std::uint64_t bytes = 0;             // write, read; a notification's length
    std::uint64_t operand = 0;           // signal: what is added to the 64-bit word
    const std::byte* payload = nullptr;  // notification: `bytes` bytes, owned by the request until it is terminal
    // Class C: the request whose writes the target counts before it applies its signal; invalid: none counts.
    Ticket counted;
};

enum class PostOutcome : std::uint8_t { posted, again, failed };

struct PostResult {
    PostOutcome outcome = PostOutcome::posted;
    Status status = Status::ok;  // why it failed
    std::int32_t code = 0;       // the provider's own error number (positive)
};

// The provider's word on one operation. One post can complete at most once per level; a terminal error ends it.
struct Completion {
    Ticket ticket;
    Status status = Status::ok;
    Level level = Level::delivered;
    std::int32_t code = 0;
};

}  // namespace expertwire
