// Names of a peer's endpoints, as addresses and messages about replacements carry them: each behind its u32 length.
// Pure. They come from outside: all of them are looked at before the first is given to libfabric.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace expertwire::fabric {

inline constexpr std::size_t kNameBytesMax = 512;

// fi_av_insert takes no lengths (fi_av(3)): it reads as many bytes as the format of addresses has, or up to a zero.
struct NameFormat {
    std::size_t bytes = 0;  // of a name of our own
    bool text = false;      // ends with a zero, however long it is
};

struct EndpointNames {
    std::vector<std::span<const std::byte>> names;
    std::string wrong;  // why there are none; empty where all is well
};

inline EndpointNames split_names(std::span<const std::byte> bytes, std::size_t count, const NameFormat& format) {
    const auto wrong = [](std::size_t index, const std::string& why) {
        return EndpointNames{{}, "name " + std::to_string(index) + " of an endpoint " + why};
    };
    EndpointNames found;
    while (found.names.size() < count) {
        const std::size_t index = found.names.size();
        std::uint32_t length = 0;
        if (bytes.size() < sizeof(length)) return wrong(index, "is missing, of " + std::to_string(count));
        std::memcpy(&length, bytes.data(), sizeof(length));
        bytes = bytes.subspan(sizeof(length));
        if (length == 0 || length > kNameBytesMax)
            return wrong(index,
                         "has " + std::to_string(length) + " bytes, outside 1.." + std::to_string(kNameBytesMax));
        if (bytes.size() < length)
            return wrong(
                index, "breaks off after " + std::to_string(bytes.size()) + " of " + std::to_string(length) + " bytes");
        const std::span<const std::byte> name = bytes.first(length);
        if (format.text && name.back() != std::byte{0}) return wrong(index, "does not end with a zero");
        if (!format.text && length != format.bytes)
            return wrong(index, "has " + std::to_string(length) + " bytes, those here " + std::to_string(format.bytes) +
                                    ": it is not of the same network");
        found.names.push_back(name);
        bytes = bytes.subspan(length);
    }
    if (!bytes.empty()) return {{}, std::to_string(bytes.size()) + " bytes follow the last name of an endpoint"};
    return found;
}

}  // namespace expertwire::fabric
