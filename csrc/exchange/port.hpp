// What an exchange needs of the world around it: memory that it may load and store, and a way to reach the rest.
// The runtime implements it over the engine and a provider, the simulation over the engine and virtual time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/types.hpp"

namespace expertwire::exchange {

// The three regions of a rank (DESIGN "Memory"). Same kinds, same layout arithmetic on every rank.
enum class Region : std::uint8_t { control = 0, staging, data };

// Base addresses of one rank's regions as mapped here; all null for a rank of another node.
struct RankMemory {
    std::byte* control = nullptr;
    std::byte* staging = nullptr;
    std::byte* data = nullptr;
};

class Port {
  public:
    virtual ~Port() = default;

    // My own regions and those of the ranks of my node, indexed by rank.
    virtual const std::vector<RankMemory>& memory() const = 0;

    // Bytes of one of my regions, and where they go in one of the rank's.
    struct Piece {
        Region from = Region::staging;
        std::uint64_t from_offset = 0;
        Region to = Region::staging;
        std::uint64_t to_offset = 0;
        std::uint64_t bytes = 0;
    };

    // Write pieces, one at least, then add `delta` to the 64-bit word at `word_offset` of the rank's control region
    // once all bytes are *delivered* (a gated signal, scope request). nullopt: would block, nothing was taken.
    struct Put {
        std::uint32_t rank = 0;
        Piece head;
        Piece tail;                   // of 0 bytes: there is none
        std::span<const Piece> more;  // beyond these two, none empty
        std::uint64_t word_offset = 0;
        std::uint64_t delta = 0;
    };
    virtual std::optional<Ticket> put(const Put& put) = 0;

    // Add to a word of the rank's control region, behind nothing (a credit). False: would block, nothing was taken.
    virtual bool add(std::uint32_t rank, std::uint64_t word_offset, std::uint64_t delta) = 0;

    // One local load: how the put stands. `ok` means that its source bytes may be overwritten.
    virtual Status status(Ticket ticket) = 0;

    // The put's source bytes are to be overwritten, and its target must not take them for what was sent. `cancelled`:
    // its word will not change, and its status ends so. `ok`: all bytes have been delivered. `pending`: the signal is
    // on its way and so are bytes, wait for its status.
    virtual Status withhold(Ticket ticket) = 0;

    // Words were stored in the memory of a rank of my node: ring its doorbell (store, fence, bump, wake if it waits).
    virtual void wake(std::uint32_t rank) = 0;
};

}  // namespace expertwire::exchange
