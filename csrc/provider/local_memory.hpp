// Memory shared by the local providers of one host. Private to local.cpp.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace expertwire::local {

class File {
  public:
    File() = default;
    explicit File(int fd) : fd_(fd) {}
    File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    File& operator=(File&& other) noexcept {
        reset();
        fd_ = std::exchange(other.fd_, -1);
        return *this;
    }
    ~File() { reset(); }
    void reset() {
        if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    }
    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }

  private:
    int fd_ = -1;
};

class Mapping {
  public:
    Mapping() = default;
    Mapping(std::byte* base, std::size_t bytes, std::size_t skip) : base_(base), bytes_(bytes), skip_(skip) {}
    Mapping(Mapping&& other) noexcept
        : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_), skip_(other.skip_) {}
    Mapping& operator=(Mapping&& other) noexcept {
        reset();
        base_ = std::exchange(other.base_, nullptr);
        bytes_ = other.bytes_;
        skip_ = other.skip_;
        return *this;
    }
    ~Mapping() { reset(); }
    void reset() {
        if (base_ != nullptr) munmap(std::exchange(base_, nullptr), bytes_);
    }
    // `bytes` of the file from `offset` on; empty with errno set when it cannot be.
    static Mapping of(int fd, std::uint64_t offset, std::uint64_t bytes) {
        const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
        const std::uint64_t skip = offset % page;
        void* base =
            mmap(nullptr, bytes + skip, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset - skip));
        if (base == MAP_FAILED) return {};
        return {static_cast<std::byte*>(base), bytes + skip, skip};
    }
    std::byte* data() const { return base_ + skip_; }
    explicit operator bool() const { return base_ != nullptr; }

  private:
    std::byte* base_ = nullptr;
    std::size_t bytes_ = 0, skip_ = 0;
};

// One registered region, as its owner publishes it: a key that says anything else of it is forged, or damaged, and
// would reach memory that nobody has registered. Written before `registration`.
struct RegionSlot {
    std::atomic<std::uint64_t> registration;  // 0: none. Numbers are never used twice
    std::atomic<std::uint64_t> address, offset, bytes;
    std::atomic<std::int32_t> fd;
    std::atomic<std::uint32_t> access;
};

// One peer that writes here. It says where it is about to copy, looks whether that is still open to it, copies, and
// takes its word back: so an owner that has closed a region and finds it in nobody's word knows that nobody writes
// there any more. Who was killed in the middle of a copy leaves its word behind: the owner clears that once the process
// has ended, and not before, for one that is stopped goes on when it wakes.
struct alignas(64) UserSlot {
    std::atomic<std::uint64_t> process;     // process_word() of whoever has taken this entry; 0: free
    std::atomic<std::uint64_t> name;        // of its socket; 0: not yet told
    std::atomic<std::uint32_t> using_slot;  // RegionSlot + 1; 0: none
    std::atomic<std::uint32_t> fenced;      // 1, from the owner: it may not write here any more
};
inline constexpr std::uint32_t kUsersMax = 512;

// A process among all that ever had its number: the number, and the low half of its start time in clock ticks since
// boot (proc(5), field 22 of stat), which come round after 497 days. 0: there is no such process.
std::uint64_t process_word(std::int32_t pid);

// What each provider shows its peers, in a memfd of its own.
struct Mailbox {
    static constexpr std::uint64_t kMagic = 0x33'58'4f'42'4c'41'58'45;  // "EXALBOX3"
    std::uint64_t magic;
    std::uint64_t secret;  // proves that the file is the one that the address names
    std::uint32_t slots;
    std::uint32_t reserved;
    alignas(64) std::atomic<std::uint64_t> landed;    // signals and notifications, counted by their senders
    std::atomic<std::uint64_t> messages;              // datagrams among them
    alignas(64) std::atomic<std::uint32_t> sleeping;  // 1: whoever lands something sends a bell
    UserSlot users[kUsersMax];
    alignas(64) RegionSlot regions[1];  // `slots` of them

    static std::size_t bytes_for(std::uint32_t slots) { return sizeof(Mailbox) + slots * sizeof(RegionSlot); }
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace expertwire::local
