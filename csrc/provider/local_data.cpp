// Copies, signals, notifications, and what they leave at their target.
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "provider/local_provider.hpp"

namespace expertwire::local {
namespace {

constexpr std::uint64_t kAtOnceBytes = 64 * 1024;  // copied by the post itself: ~10 µs
constexpr std::uint64_t kStepBytes = 128 * 1024;   // copied by one poll under one word: who closes a region waits
constexpr std::chrono::milliseconds kLives{1};     // who was seen alive has its number for so long at least
constexpr int kDatagramsMax = 64;                  // taken by one poll
constexpr std::uint32_t kLookEvery = 64;           // polls; a sender may have died between its datagram and its count

// Our word in a peer's mailbox while we touch a region of its; true while the key is the current one, and we are not
// fenced off.
class Use {
  public:
    Use(const Peer& peer, const Key& key) : user_(*peer.user) {
        user_.using_slot.store(key.slot + 1, std::memory_order_seq_cst);
        const RegionSlot& slot = peer.mailbox().regions[key.slot];
        valid_ = slot.registration.load(std::memory_order_seq_cst) == key.registration &&
                 user_.fenced.load(std::memory_order_seq_cst) == 0;
    }
    ~Use() { user_.using_slot.store(0, std::memory_order_release); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    explicit operator bool() const { return valid_; }

  private:
    UserSlot& user_;
    bool valid_;
};

}  // namespace

PostResult LocalProvider::refuse(Status status, int code) {
    ++counters_.failed;
    return {PostOutcome::failed, status, code};
}

std::optional<Status> LocalProvider::check(const PostCommand& command) const {
    if (!open_now()) return Status::closed;
    if (command.ticket.slot >= options_.slots || command.endpoint.value >= options_.endpoints) return Status::invalid;
    if (command.peer.value >= peers_.size() || !peers_[command.peer.value]) return Status::invalid;
    if (command.kind == OpKind::notification) {
        if (command.bytes > options_.notification_bytes_max) return Status::out_of_range;
        return command.bytes != 0 && command.payload == nullptr ? std::optional(Status::invalid) : std::nullopt;
    }
    const RemoteRegion* const known = remote_of(command.remote);
    if (known == nullptr) return Status::bad_key;
    const RemoteRegion& remote = *known;
    if (remote.is != KeyIs::published || remote.peer != command.peer ||
        (remote.key.access & (command.kind == OpKind::read ? 2u : 1u)) == 0)
        return Status::bad_key;
    const std::uint64_t bytes = command.kind == OpKind::signal ? sizeof(std::uint64_t) : command.bytes;
    if (bytes > remote.key.bytes || command.remote_offset > remote.key.bytes - bytes) return Status::out_of_range;
    if (command.kind == OpKind::signal)
        return command.remote_offset % sizeof(std::uint64_t) != 0 ? std::optional(Status::invalid) : std::nullopt;
    if (command.local.value >= regions_.size() || !regions_[command.local.value]) return Status::invalid;
    const RegionSpec& local = regions_[command.local.value]->spec;
    if (command.bytes > local.bytes || command.local_offset > local.bytes - command.bytes) return Status::out_of_range;
    return std::nullopt;
}

PostResult LocalProvider::post(const PostCommand& command) {
    if (const std::optional<Status> status = check(command)) return refuse(*status);
    if (copies_.size() + done_.size() >= options_.transmit_queue) {
        ++counters_.again;
        return {PostOutcome::again, Status::would_block, 0};
    }
    Copied copied;
    switch (command.kind) {
        case OpKind::write:
        case OpKind::read:
            if (command.bytes > kAtOnceBytes) {
                copies_.push_back({command, 0});
                ++regions_[command.local.value]->in_flight;
                ++counters_.posted;
                return {};
            }
            copied = copy(command, 0, command.bytes);
            break;
        case OpKind::signal:
            copied.status = signal(command);
            break;
        case OpKind::notification:
            return notify(command);
    }
    if (copied.status != Status::ok) return refuse(copied.status, copied.code);
    ++counters_.posted;
    done_.push_back({command.ticket, Status::ok, command.level, 0});
    return {};
}

// The kernel copies; who has ended since is not written to under its number, since that is looked at first: not at each
// copy, for the kernel gives all other numbers before it gives one again, which takes longer than a millisecond. A
// process whose memory is gone although it is registered gets an error here, not a fault.
Copied LocalProvider::attached(const Peer& peer, std::uint64_t there, std::byte* here, std::uint64_t bytes,
                               OpKind kind) {
    const auto now = std::chrono::steady_clock::now();
    if (now >= peer.look_again) {
        pollfd entry{peer.process.get(), POLLIN, 0};  // readable once it has ended (pidfd_open(2))
        if (::poll(&entry, 1, 0) != 0) return {Status::peer_dead, ESRCH};
        peer.look_again = now + kLives;
    }
    for (std::uint64_t done = 0; done < bytes;) {
        iovec mine{here + done, bytes - done};
        iovec theirs{reinterpret_cast<void*>(there + done), bytes - done};
        const ssize_t moved = kind == OpKind::write ? process_vm_writev(peer.address.pid, &mine, 1, &theirs, 1, 0)
                                                    : process_vm_readv(peer.address.pid, &mine, 1, &theirs, 1, 0);
        if (moved < 0 && errno == ESRCH) return {Status::peer_dead, ESRCH};
        if (moved < 0) return {Status::io_error, errno};
        if (moved == 0) return {Status::io_error, EFAULT};
        done += static_cast<std::uint64_t>(moved);
    }
    return {};
}

Copied LocalProvider::copy(const PostCommand& command, std::uint64_t done, std::uint64_t bytes) {
    const RemoteRegion& remote = *remotes_[row_of(command.remote)];
    const Peer& peer = *peers_[command.peer.value];
    const Use use(peer, remote.key);
    if (!use) return {Status::bad_key, 0};
    std::byte* here = regions_[command.local.value]->spec.address + command.local_offset + done;
    if (!remote.mapping)
        return attached(peer, remote.key.address + command.remote_offset + done, here, bytes, command.kind);
    std::byte* there = remote.mapping.data() + command.remote_offset + done;
    if (command.kind == OpKind::write) {
        std::memcpy(there, here, bytes);
    } else {
        std::memcpy(here, there, bytes);
    }
    return {};
}

Status LocalProvider::signal(const PostCommand& command) {
    Peer& peer = *peers_[command.peer.value];
    const RemoteRegion& remote = *remotes_[row_of(command.remote)];
    if (!remote.mapping) return Status::invalid;  // words that are added to are mapped
    {
        const Use use(peer, remote.key);
        if (!use) return Status::bad_key;
        auto& word = *reinterpret_cast<std::uint64_t*>(remote.mapping.data() + command.remote_offset);
        std::atomic_ref(word).fetch_add(command.operand, std::memory_order_release);
    }
    landed(command.peer, peer, false);
    return Status::ok;
}

PostResult LocalProvider::notify(const PostCommand& command) {
    Peer& peer = *peers_[command.peer.value];
    Datagram header;
    header.notification = 1;
    header.sender = address_.name;
    header.secret = peer.address.secret;
    std::array<iovec, 2> pieces{{{&header, sizeof(header)}, {const_cast<std::byte*>(command.payload), command.bytes}}};
    msghdr message{};
    message.msg_name = &peer.socket;
    message.msg_namelen = peer.socket_bytes;
    message.msg_iov = pieces.data();
    message.msg_iovlen = command.bytes != 0 ? 2 : 1;
    if (sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
        const int code = errno;
        if (code == EAGAIN || code == EWOULDBLOCK || code == ENOBUFS || code == EINTR) {
            ++counters_.again;
            return {PostOutcome::again, Status::would_block, 0};
        }
        return refuse(code == ECONNREFUSED || code == ENOENT ? Status::peer_dead : Status::io_error, code);
    }
    landed(command.peer, peer, true);
    ++counters_.posted;
    done_.push_back({command.ticket, Status::ok, command.level, 0});
    return {};
}

// seq_cst on both sides: either the peer sees the count before it sleeps, or we see that it sleeps.
void LocalProvider::landed(PeerId id, Peer& peer, bool message) {
    Mailbox& box = peer.mailbox();
    if (message) box.messages.fetch_add(1, std::memory_order_release);
    box.landed.fetch_add(1, std::memory_order_seq_cst);
    if (box.sleeping.load(std::memory_order_seq_cst) != 0 && box.sleeping.exchange(0) != 0 && !message) {
        Datagram bell;
        bell.sender = address_.name;
        bell.secret = peer.address.secret;
        // A full queue is readable already, and a dead peer needs no bell.
        static_cast<void>(sendto(socket_.get(), &bell, sizeof(bell), MSG_DONTWAIT | MSG_NOSIGNAL,
                                 reinterpret_cast<const sockaddr*>(&peer.socket), peer.socket_bytes));
    }
    if (options_.landed) options_.landed(id);
}

void LocalProvider::finish(const PostCommand& command, Status status, int code) {
    --regions_[command.local.value]->in_flight;
    done_.push_back({command.ticket, status, command.level, code});
}

// Round robin over the copies in progress, one step a poll: no long copy holds up another.
void LocalProvider::advance_copies() {
    if (copies_.empty()) return;
    Copy next = copies_.front();
    copies_.pop_front();
    const std::uint64_t bytes = std::min(kStepBytes, next.command.bytes - next.done);
    const Copied copied = copy(next.command, next.done, bytes);
    next.done += bytes;
    if (copied.status == Status::ok && next.done < next.command.bytes) {
        copies_.push_back(next);
    } else {
        finish(next.command, copied.status, copied.code);
    }
}

std::size_t LocalProvider::poll(std::span<Completion> completions, std::vector<Arrival>& arrivals) {
    if (!open_now()) return 0;
    mailbox().sleeping.store(0, std::memory_order_relaxed);
    landed_seen_ = mailbox().landed.load(std::memory_order_acquire);
    if (mailbox().messages.load(std::memory_order_acquire) != messages_seen_ || ++polls_ % kLookEvery == 0)
        take_datagrams(arrivals);
    advance_copies();
    std::size_t count = 0;
    while (!done_.empty() && count < completions.size()) {
        completions[count++] = done_.front();
        done_.pop_front();
        ++counters_.completed;
    }
    return count;
}

void LocalProvider::take_datagrams(std::vector<Arrival>& arrivals) {
    for (int taken = 0; taken < kDatagramsMax; ++taken) {
        const ssize_t got = recv(socket_.get(), datagram_.data(), datagram_.size(), MSG_DONTWAIT | MSG_TRUNC);
        if (got < 0) return;
        Datagram header;
        const auto bytes = static_cast<std::size_t>(got);
        const bool whole = bytes >= sizeof(header) && bytes <= datagram_.size();
        if (whole) std::memcpy(&header, datagram_.data(), sizeof(header));
        if (!whole || header.magic != Datagram{}.magic || header.secret != address_.secret) {
            ++counters_.dropped_messages;
            continue;
        }
        if (header.notification == 0) continue;
        ++messages_seen_;
        const auto sender = std::find_if(peers_.begin(), peers_.end(),
                                         [&](const auto& peer) { return peer && peer->address.name == header.sender; });
        if (sender == peers_.end()) {
            ++counters_.dropped_messages;
            continue;
        }
        const PeerId id{static_cast<std::uint32_t>(sender - peers_.begin())};
        arrivals.push_back({id, {datagram_.begin() + sizeof(header), datagram_.begin() + got}});
    }
}

bool LocalProvider::may_sleep() {
    if (!open_now() || !copies_.empty() || !done_.empty()) return false;
    mailbox().sleeping.store(1, std::memory_order_seq_cst);
    if (mailbox().landed.load(std::memory_order_seq_cst) == landed_seen_) return true;
    mailbox().sleeping.store(0, std::memory_order_relaxed);
    return false;
}

}  // namespace expertwire::local
