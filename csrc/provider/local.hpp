// Provider for ranks of one host: a peer's memfd regions are mapped here; a write is a copy, a signal an atomic add
// with release order, a notification a datagram. Works without libfabric.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "provider/provider.hpp"

namespace expertwire {

struct LocalOptions {
    std::uint32_t endpoints = 1;
    std::uint32_t slots = 2048;       // ticket slots, as for libfabric
    std::uint32_t regions_max = 256;  // regions registered at one time
    std::uint32_t notification_bytes_max = 8192;
    std::uint32_t transmit_queue = 512;  // operations held before AGAIN
    // Called after a signal or notification has landed at `peer`, from post() or poll(); may be empty. The provider
    // wakes the peer's sleeping progress thread by itself (its wait_fd() becomes readable); this is for whoever wants
    // to ring the peer's doorbell directly and save that hand-over.
    std::function<void(PeerId)> landed;
};

// Null on failure (`refused`, `io_error`: the call and its code).
std::unique_ptr<Provider> open_local(const LocalOptions& options, ControlResult& result);

// Where a peer's region is mapped here, or null: not a local provider, or not announced. Valid until the peer is
// removed.
std::byte* mapped_region(const Provider& provider, RemoteRegionId id);

}  // namespace expertwire
