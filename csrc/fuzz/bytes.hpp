// Bytes of a fuzzer as a source of small decisions. Past the end everything is 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace expertwire::fuzz {

class Bytes {
  public:
    Bytes(const std::uint8_t* data, std::size_t size) : rest_(data, size) {}
    bool empty() const { return rest_.empty(); }
    std::uint8_t byte() {
        if (rest_.empty()) return 0;
        const std::uint8_t value = rest_.front();
        rest_ = rest_.subspan(1);
        return value;
    }
    std::uint32_t below(std::uint32_t limit) { return byte() % limit; }
    std::span<const std::byte> take(std::size_t most) {
        const std::size_t count = most < rest_.size() ? most : rest_.size();
        const std::span<const std::byte> taken = std::as_bytes(rest_.first(count));
        rest_ = rest_.subspan(count);
        return taken;
    }

  private:
    std::span<const std::uint8_t> rest_;
};

}  // namespace expertwire::fuzz
