// The provider for one host. Private to local*.cpp; open_local() makes one.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "provider/local.hpp"
#include "provider/local_memory.hpp"

namespace expertwire::local {

inline constexpr std::uint32_t kIdsMax = 1u << 20;
inline constexpr std::uint64_t kCopyBytesMax = std::uint64_t{1} << 40;

struct Address {
    std::uint32_t magic = 0x32'4c'58'45;  // "EXL2"
    std::int32_t pid = 0;
    std::int32_t mailbox = -1;
    std::uint32_t slots = 0;
    std::uint64_t name = 0;    // of the socket
    std::uint64_t secret = 0;  // not to be seen in /proc/net/unix
    std::uint64_t box = 0;     // where its process has the mailbox: read there, the secret proves that we may attach
};
static_assert(sizeof(Address) == 40);

struct Key {
    std::uint32_t magic = 0x32'52'58'45;  // "EXR2"
    std::int32_t fd = -1;                 // of the memfd; -1: the caller's own memory, at `address`
    std::uint32_t slot = 0;
    std::uint32_t access = 0;  // bit 0: write, bit 1: read
    std::uint64_t registration = 0;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::uint64_t address = 0;
};
static_assert(sizeof(Key) == 48);

struct Datagram {
    std::uint32_t magic = 0x31'44'58'45;  // "EXD1"
    std::uint32_t notification = 0;       // 0: a bell
    std::uint64_t sender = 0;             // name of its socket
    std::uint64_t secret = 0;             // the receiver's
};
static_assert(sizeof(Datagram) == 24);

// Whether its memory can be reached by process_vm_readv and process_vm_writev; asked once.
enum class Attach : std::uint8_t { unknown = 0, allowed, refused };

struct Peer {
    Address address;
    Mapping mapping;
    Attach attach = Attach::unknown;
    int attach_code = 0;  // why not
    File process;         // pidfd: a number that a process has again is not its own
    mutable std::chrono::steady_clock::time_point look_again;  // at it
    UserSlot* user = nullptr;                                  // ours, in its mailbox
    sockaddr_un socket{};
    socklen_t socket_bytes = 0;
    Mailbox& mailbox() const { return *reinterpret_cast<Mailbox*>(mapping.data()); }
};

struct LocalRegion {
    RegionSpec spec;
    File file;               // our own descriptor of its memfd
    std::uint32_t slot = 0;  // in the mailbox
    std::uint64_t registration = 0;
    std::uint32_t in_flight = 0;
};

// A key, beside what its owner publishes. stale: of no registration that is there now; and if it should name a later
// one, it was made up.
enum class KeyIs : std::uint8_t { published, stale, forged };

struct RemoteRegion {
    RemoteRegionId id;
    PeerId peer;
    Key key;
    KeyIs is = KeyIs::stale;
    Mapping mapping;  // none of the caller's own memory
};

// How a copy ended, and errno behind it.
struct Copied {
    Status status = Status::ok;
    int code = 0;
};

// A copy that is too long for its post.
struct Copy {
    PostCommand command;
    std::uint64_t done = 0;  // bytes
};

class LocalProvider final : public Provider {
  public:
    explicit LocalProvider(const LocalOptions& options) : options_(options), owner_(getpid()) {
        capabilities_.provider = "local";
        capabilities_.ordering = OrderingClass::delivery_gated;
        capabilities_.delivery_complete = true;
        capabilities_.remote_atomics = true;
        capabilities_.manual_progress = false;
        capabilities_.ends_at_post = true;
        capabilities_.message_bytes_max = kCopyBytesMax;
        capabilities_.notification_bytes_max = options.notification_bytes_max;
        capabilities_.transmit_queue = options.transmit_queue;
        capabilities_.waits_on_descriptor = true;
        capabilities_.why =
            "copies into mapped or attached memory, complete when done; long ones overtake each other; signals are C++ "
            "atomics";
    }
    ~LocalProvider() override { close(); }

    ControlResult open();
    const Capabilities& capabilities() const override { return capabilities_; }
    ControlResult register_region(RegionId id, const RegionSpec& spec) override;
    ControlResult deregister_region(RegionId id) override;
    std::vector<std::byte> address(EndpointId endpoint) const override;
    std::vector<std::byte> region_key(RegionId id) const override;
    ControlResult add_peer(PeerId peer, std::span<const std::byte> address) override;
    ControlResult remove_peer(PeerId peer) override;
    void fence_peer(PeerId peer) override;
    bool stands_in(PeerId peer, RegionId id) override;
    ControlResult add_remote_region(PeerId peer, RemoteRegionId id, std::span<const std::byte> key) override;
    void forget_remote_region(RemoteRegionId id) override;
    PostResult post(const PostCommand& command) override;
    std::size_t poll(std::span<Completion> completions, std::vector<Arrival>& arrivals) override;
    int wait_fd() const override { return socket_.get(); }
    bool copying() const override { return !copies_.empty(); }
    bool may_sleep() override;
    ProviderCounters counters() const override { return counters_; }
    void close() override;
    std::byte* mapped(RemoteRegionId id) const {
        const RemoteRegion* const remote = remote_of(id);
        return remote != nullptr ? remote->mapping.data() : nullptr;
    }

  private:
    Mailbox& mailbox() const { return *reinterpret_cast<Mailbox*>(mailbox_.data()); }
    bool open_now() const { return static_cast<bool>(mailbox_); }
    std::optional<Status> check(const PostCommand& command) const;
    // Null: given back, or never added.
    const RemoteRegion* remote_of(RemoteRegionId id) const {
        const RemoteRegion* const row = row_of(id) < remotes_.size() ? remotes_[row_of(id)].get() : nullptr;
        return row != nullptr && row->id == id ? row : nullptr;
    }
    void end_copies(Status status, const std::function<bool(const PostCommand&)>& which);
    PostResult refuse(Status status, int code = 0);
    void publish(const Key& key);
    static KeyIs look_up(const Peer& peer, const Key& key);
    static Key key_of(const LocalRegion& region);
    UserSlot* claim_user(Mailbox& box) const;
    void release_user(Peer& peer) const;
    void set_fence(std::uint64_t name, bool fenced);
    void forgive_dead();
    bool in_use(std::uint32_t slot) const;
    bool may_attach(Peer& peer) const;
    static Copied attached(const Peer& peer, std::uint64_t there, std::byte* here, std::uint64_t bytes, OpKind kind);
    Copied copy(const PostCommand& command, std::uint64_t done, std::uint64_t bytes);
    Status signal(const PostCommand& command);
    PostResult notify(const PostCommand& command);
    void landed(PeerId id, Peer& peer, bool message);
    void advance_copies();
    void finish(const PostCommand& command, Status status, int code = 0);
    void take_datagrams(std::vector<Arrival>& arrivals);

    LocalOptions options_;
    Capabilities capabilities_;
    ProviderCounters counters_;
    pid_t owner_;
    File file_, socket_;
    Mapping mailbox_;
    Address address_;
    std::uint64_t next_registration_ = 1;
    std::uint64_t landed_seen_ = 0, messages_seen_ = 0;
    std::uint32_t polls_ = 0;
    std::vector<std::uint32_t> free_slots_;
    std::vector<std::unique_ptr<LocalRegion>> regions_;
    std::vector<std::unique_ptr<Peer>> peers_;
    std::vector<std::unique_ptr<RemoteRegion>> remotes_;  // by row of RemoteRegionId
    std::deque<Copy> copies_;
    std::deque<Completion> done_;
    std::vector<std::byte> datagram_;
};

}  // namespace expertwire::local
