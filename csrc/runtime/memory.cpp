#include "runtime/memory.hpp"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "runtime/failure.hpp"
#include "runtime/memory_limit.hpp"

namespace expertwire::runtime {

std::string errno_text(int error) {
    const char* name = strerrorname_np(error);
    const char* words = strerrordesc_np(error);
    return std::string(name ? name : "errno") + " (" + std::to_string(error) + ", " + (words ? words : "unknown") + ")";
}

Mapping::Mapping(int fd, std::uint64_t bytes, const std::string& what) {
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED)
        throw Failure(FailureKind::capacity, "mmap of " + std::to_string(bytes) + " bytes for " + what +
                                                 " failed: " + errno_text(errno) +
                                                 "; ask for less, or raise the limit (ulimit -v, cgroup)");
    address_ = static_cast<std::byte*>(address);
    bytes_ = bytes;
}

Mapping::Mapping(Mapping&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

Mapping::~Mapping() {
    if (address_) munmap(address_, bytes_);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

Descriptor::~Descriptor() {
    reset();
}

void Descriptor::reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

Descriptor create_memfd(const std::string& name, std::uint64_t bytes) {
    const auto failed = [&](const char* call, int error) {
        return Failure(FailureKind::capacity,
                       std::string(call) + " for region '" + name + "' of " + std::to_string(bytes) +
                           " bytes failed: " + errno_text(error) +
                           "; free memory, raise the cgroup's limit or ask for a smaller region");
    };
    // Neither call below fails where memory ends: the kernel would kill a process instead.
    const MemoryLimit limit = memory_limit();
    if (bytes > limit.available_bytes)
        throw Failure(FailureKind::capacity, "region '" + name + "' needs " + std::to_string(bytes) + " bytes, and " +
                                                 std::to_string(limit.available_bytes) + " are available (" +
                                                 limit.source + "); ask for a smaller one or free memory");
    Descriptor fd(memfd_create(("expertwire-" + name).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd.get() < 0) throw failed("memfd_create", errno);
    // A sparse file would turn a full machine into SIGBUS at the first touch; allocated now, it is an error now.
    int error = 0;
    do error = posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
    while (error == EINTR);
    if (error != 0) throw failed("posix_fallocate", error);
    // Peers map it at this size for as long as it lives.
    fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    return fd;
}

std::uint64_t file_bytes(int fd, const std::string& what) {
    struct stat facts{};
    if (fstat(fd, &facts) != 0)
        throw Failure(FailureKind::invalid_argument,
                      "descriptor " + std::to_string(fd) + " for " + what + " cannot be used: " + errno_text(errno));
    return static_cast<std::uint64_t>(facts.st_size);
}

}  // namespace expertwire::runtime
