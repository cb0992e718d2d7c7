// What ranks tell each other at the bootstrap: a versioned, bounded, little-endian record; never pickle, never trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/identity.hpp"

namespace expertwire::runtime {

struct BlobRegion {
    std::string name;
    std::uint64_t bytes = 0;
    std::vector<std::byte> key;
};

struct Blob {
    static constexpr std::uint32_t version_now = 4;

    std::uint32_t version = version_now;
    std::uint32_t rank = 0;
    std::uint32_t size = 0;
    ProcessIdentity process;
    std::uint64_t instance = 0;       // two contexts of one process differ in it
    std::uint64_t barrier_epoch = 0;  // the last that it had begun; who joins later counts on from it
    std::string provider;
    std::vector<std::byte> address;
    std::vector<BlobRegion> regions;
};

std::vector<std::byte> encode_blob(const Blob& blob);

// Throws Failure: invalid_argument for anything malformed (what, where, value, limit), mismatch for another version.
Blob decode_blob(std::span<const std::byte> bytes, std::uint32_t from_rank);

}  // namespace expertwire::runtime
