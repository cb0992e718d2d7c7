#include "runtime/memory.hpp"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>

#include "engine/types.hpp"
#include "runtime/failure.hpp"
#include "runtime/memory_limit.hpp"

namespace expertwire::runtime {

std::string errno_text(int error) {
    const char* name = strerrorname_np(error);
    const char* words = strerrordesc_np(error);
    return std::string(name ? name : "errno") + " (" + std::to_string(error) + ", " + (words ? words : "unknown") + ")";
}

namespace {

constexpr std::uint64_t huge_page_bytes = 2 << 20;
constexpr std::uint64_t huge_step_bytes = 32 * huge_page_bytes;  // each call drains every core's lists of pages first
constexpr TimeNs huge_most_ns = 1'000'000'000;
#ifdef MADV_COLLAPSE
constexpr int collapse_advice = MADV_COLLAPSE;
#else
constexpr int collapse_advice = 25;  // of linux/mman.h since 6.1
#endif

TimeNs thread_ns() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<TimeNs>(time.tv_sec) * 1'000'000'000 + static_cast<TimeNs>(time.tv_nsec);
}

// A huge page is mapped as one only where address and offset in the file leave the same rest.
void* map_shared(int fd, std::uint64_t bytes) {
    const auto map = [&](void* at, int flags) {
        return mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
    };
    if (bytes < huge_page_bytes) return map(nullptr, 0);
    void* const room = mmap(nullptr, bytes + huge_page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) return map(nullptr, 0);
    auto* const begin = static_cast<std::byte*>(room);
    const std::uint64_t skipped = huge_page_bytes - reinterpret_cast<std::uintptr_t>(room) % huge_page_bytes;
    void* const address = map(begin + skipped, MAP_FIXED);
    if (address == MAP_FAILED) {
        const int error = errno;
        munmap(room, bytes + huge_page_bytes);
        errno = error;
        return MAP_FAILED;
    }
    const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    const std::uint64_t used = (skipped + bytes + page - 1) / page * page;
    munmap(begin, skipped);
    if (used < bytes + huge_page_bytes) munmap(begin + used, bytes + huge_page_bytes - used);
    return address;
}

// Whole huge pages of the file, as far as the kernel has them at once: madvise(2), MADV_COLLAPSE "ignores any sysfs
// setting", and a memfd would get none by itself. Rows copied into it take 36% less time, sums of its rows 23%: with
// 4 KiB pages a virtual machine walks two tables for each. What it refuses is allocated page by page, as before.
void take_huge_pages(int fd, std::uint64_t bytes) {
    const std::uint64_t whole = bytes / huge_page_bytes * huge_page_bytes;
    if (whole == 0) return;
    void* const address = map_shared(fd, whole);
    if (address == MAP_FAILED) return;
    // Of this thread's own time, not of a busy machine's: the kernel may have to move others' pages for each.
    const TimeNs until = thread_ns() + huge_most_ns;
    for (std::uint64_t at = 0; at < whole && thread_ns() < until; at += huge_step_bytes) {
        const std::uint64_t step = std::min(huge_step_bytes, whole - at);
        // A range without a page is refused (EINVAL), and one page in it is enough.
        for (std::uint64_t first = at; first < at + step; first += huge_page_bytes)
            if (posix_fallocate(fd, static_cast<off_t>(first), 1) != 0) break;
        if (madvise(static_cast<std::byte*>(address) + at, step, collapse_advice) != 0) break;
    }
    munmap(address, whole);
}

}  // namespace

Mapping::Mapping(int fd, std::uint64_t bytes, const std::string& what) {
    void* address = map_shared(fd, bytes);
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
    // No call below fails where memory ends: the kernel would kill a process instead.
    const MemoryLimit limit = memory_limit();
    if (bytes > limit.available_bytes)
        throw Failure(FailureKind::capacity, "region '" + name + "' needs " + std::to_string(bytes) + " bytes, and " +
                                                 std::to_string(limit.available_bytes) + " are available (" +
                                                 limit.source + "); ask for a smaller one or free memory");
    Descriptor fd(memfd_create(("expertwire-" + name).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd.get() < 0) throw failed("memfd_create", errno);
    // A sparse file would turn a full machine into SIGBUS at the first touch; allocated now, it is an error now.
    if (ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0) take_huge_pages(fd.get(), bytes);
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
