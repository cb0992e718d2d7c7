// Shared memory without names: memfd, preallocated so that shortage is an error and never SIGBUS (DESIGN "Memory").
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace expertwire::runtime {

// A mapping of a file descriptor, unmapped when it goes. Does not own the descriptor.
class Mapping {
  public:
    Mapping() = default;
    Mapping(int fd, std::uint64_t bytes, const std::string& what);  // throws Failure(capacity): call, bytes, errno
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    ~Mapping();
    std::byte* address() const { return address_; }
    std::uint64_t bytes() const { return bytes_; }

  private:
    std::byte* address_ = nullptr;
    std::uint64_t bytes_ = 0;
};

// A descriptor, closed when it goes.
class Descriptor {
  public:
    Descriptor() = default;
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(Descriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
    Descriptor& operator=(Descriptor&& other) noexcept;
    ~Descriptor();
    int get() const { return fd_; }
    void reset();

  private:
    int fd_ = -1;
};

// A memfd of `bytes` zero bytes, every page of it allocated. Throws Failure(capacity) naming call, bytes and errno.
Descriptor create_memfd(const std::string& name, std::uint64_t bytes);

// The size of a descriptor's file. Throws Failure(invalid_argument) where it is none.
std::uint64_t file_bytes(int fd, const std::string& what);

std::string errno_text(int error);  // "ENOMEM (12, Cannot allocate memory)" without the race of strerror

}  // namespace expertwire::runtime
