// Ranks of one host. How memory reaches a process that has only the bootstrap blob: it opens /proc/<pid>/fd/<number> of
// the memfd. That needs no server, no thread and no polling on the other side, works in any order of construction, is
// not stopped by Yama (which restricts attaching, not this), and fails exactly where memory must not be shared: another
// pid namespace, another user, another host. A secret in the blob proves that the file found is the one meant.
#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "provider/local_provider.hpp"

namespace expertwire {
namespace local {
namespace {

std::string number(std::uint64_t value) {
    return std::to_string(value);
}
ControlResult invalid(const std::string& message) {
    return {Status::invalid, 0, message};
}
ControlResult failed(const std::string& call, int code) {
    return {Status::io_error, code,
            call + " failed: " + std::strerror(code) + " (" + number(static_cast<unsigned>(code)) + ")"};
}

template <class Value>
std::vector<std::byte> to_bytes(const Value& value) {
    std::vector<std::byte> bytes(sizeof(Value));
    std::memcpy(bytes.data(), &value, sizeof(Value));
    return bytes;
}

socklen_t name_socket(std::uint64_t name, sockaddr_un& address) {
    address = {};
    address.sun_family = AF_UNIX;  // a leading NUL: abstract, so no file is left behind
    const int length = std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "expertwire-%016llx",
                                     static_cast<unsigned long long>(name));
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length));
}

// Another process's descriptor, opened anew here.
File open_of(std::int32_t pid, std::int32_t fd) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    return File(::open(path.c_str(), O_RDWR | O_CLOEXEC));
}

// A word of which the process has ended, and with it every thread: a number that a process has again is not its own.
bool has_ended(std::uint64_t word) {
    const auto pid = static_cast<std::int32_t>(word >> 32);
    const File process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    if (!process) return errno == ESRCH;
    const std::uint64_t now = process_word(pid);
    if (now != 0 && now != word) return true;
    pollfd entry{process.get(), POLLIN, 0};  // readable once it has ended, reaped or not (pidfd_open(2))
    return poll(&entry, 1, 0) == 1 && (entry.revents & POLLIN) != 0;
}

bool holds(int fd, std::uint64_t bytes) {
    struct stat status{};
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && static_cast<std::uint64_t>(status.st_size) >= bytes;
}

ControlResult cannot_attach(const std::string& what, const Peer& peer) {
    return {Status::refused, peer.attach_code,
            what + " is its caller's own memory, and process " + std::to_string(peer.address.pid) +
                " may not be attached to: " + std::strerror(peer.attach_code) +
                " (another user, a container without CAP_SYS_PTRACE, or kernel.yama.ptrace_scope above 0); create the "
                "memory with region(), or use a libfabric provider"};
}

}  // namespace

std::uint64_t process_word(std::int32_t pid) {
    const File file(::open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
    std::array<char, 1024> text{};
    const ssize_t got = file ? read(file.get(), text.data(), text.size() - 1) : -1;
    if (got <= 0) return 0;
    // The second field is a name in brackets, in which there may be blanks and brackets; the 22nd is wanted.
    const char* at = std::strrchr(text.data(), ')');
    for (int field = 2; at != nullptr && field < 22; ++field) at = std::strchr(at + 1, ' ');
    if (at == nullptr) return 0;
    const auto start = std::strtoull(at, nullptr, 10);
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(pid)) << 32 | static_cast<std::uint32_t>(start);
}

ControlResult LocalProvider::open() {
    if (options_.endpoints == 0) return invalid("endpoints=0: at least one is needed");
    if (options_.regions_max == 0 || options_.regions_max > kIdsMax)
        return invalid("regions_max=" + number(options_.regions_max) + " is outside 1.." + number(kIdsMax));
    if (options_.transmit_queue == 0) return invalid("transmit_queue=0: at least one operation must fit");
    if (options_.notification_bytes_max > 65'536)
        return invalid("notification_bytes_max=" + number(options_.notification_bytes_max) + " is above 65536");
    std::array<std::uint64_t, 2> random{};
    if (getrandom(random.data(), sizeof(random), 0) != sizeof(random)) return failed("getrandom", errno);
    const std::size_t bytes = Mailbox::bytes_for(options_.regions_max);
    file_ = File(memfd_create("expertwire-mailbox", MFD_CLOEXEC));
    if (!file_) return failed("memfd_create", errno);
    if (const int code = posix_fallocate(file_.get(), 0, static_cast<off_t>(bytes)); code != 0)
        return failed("posix_fallocate(" + number(bytes) + ")", code);
    Mapping mapping = Mapping::of(file_.get(), 0, bytes);
    if (!mapping) return failed("mmap(" + number(bytes) + ")", errno);
    address_ = {
        .pid = owner_, .mailbox = file_.get(), .slots = options_.regions_max, .name = random[0], .secret = random[1]};
    socket_ = File(socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket_) return failed("socket(AF_UNIX)", errno);
    sockaddr_un name{};
    const socklen_t name_bytes = name_socket(address_.name, name);
    if (bind(socket_.get(), reinterpret_cast<sockaddr*>(&name), name_bytes) != 0)
        return failed("bind(abstract socket)", errno);
    auto& box = *reinterpret_cast<Mailbox*>(mapping.data());
    box.magic = Mailbox::kMagic;
    box.secret = address_.secret;
    box.slots = options_.regions_max;
    address_.box = reinterpret_cast<std::uintptr_t>(mapping.data());
    mailbox_ = std::move(mapping);
    for (std::uint32_t slot = options_.regions_max; slot-- > 0;) free_slots_.push_back(slot);
    datagram_.resize(sizeof(Datagram) + options_.notification_bytes_max);
    return {};
}

ControlResult LocalProvider::register_region(RegionId id, const RegionSpec& spec) {
    if (!open_now()) return {Status::closed, 0, "register_region: the provider was closed"};
    if (id.value >= kIdsMax) return invalid("region id " + number(id.value) + " is not below " + number(kIdsMax));
    if (spec.address == nullptr || spec.bytes == 0)
        return invalid("region " + number(id.value) + ": empty memory cannot be registered");
    if (spec.fd >= 0 && !holds(spec.fd, spec.fd_offset + spec.bytes)) {
        return invalid("region " + number(id.value) + ": its file is shorter than offset " + number(spec.fd_offset) +
                       " + " + number(spec.bytes) + " bytes");
    }
    if (regions_.size() <= id.value) regions_.resize(id.value + 1);
    if (regions_[id.value]) return {Status::refused, 0, "region " + number(id.value) + " is registered already"};
    if (free_slots_.empty())
        return {Status::refused, 0,
                "no more than " + number(options_.regions_max) + " regions can be registered at one time"};
    auto region = std::make_unique<LocalRegion>();
    region->spec = spec;
    if (spec.fd >= 0) {
        region->file = File(fcntl(spec.fd, F_DUPFD_CLOEXEC, 0));
        if (!region->file) return failed("dup of the region's file", errno);
    }
    region->slot = free_slots_.back();
    free_slots_.pop_back();
    region->registration = next_registration_++;
    regions_[id.value] = std::move(region);
    publish(key_of(*regions_[id.value]));
    return {};
}

void LocalProvider::publish(const Key& key) {
    RegionSlot& slot = mailbox().regions[key.slot];
    slot.address.store(key.address, std::memory_order_relaxed);
    slot.offset.store(key.offset, std::memory_order_relaxed);
    slot.bytes.store(key.bytes, std::memory_order_relaxed);
    slot.fd.store(key.fd, std::memory_order_relaxed);
    slot.access.store(key.access, std::memory_order_relaxed);
    slot.registration.store(key.registration, std::memory_order_release);
}

KeyIs LocalProvider::look_up(const Peer& peer, const Key& key) {
    const RegionSlot& slot = peer.mailbox().regions[key.slot];
    if (slot.registration.load(std::memory_order_acquire) != key.registration) return KeyIs::stale;
    const bool same = slot.address.load(std::memory_order_relaxed) == key.address &&
                      slot.offset.load(std::memory_order_relaxed) == key.offset &&
                      slot.bytes.load(std::memory_order_relaxed) == key.bytes &&
                      slot.fd.load(std::memory_order_relaxed) == key.fd &&
                      slot.access.load(std::memory_order_relaxed) == key.access;
    std::atomic_thread_fence(std::memory_order_acquire);
    // What was read meanwhile may be of the next registration.
    if (slot.registration.load(std::memory_order_relaxed) != key.registration) return KeyIs::stale;
    return same ? KeyIs::published : KeyIs::forged;
}

ControlResult LocalProvider::deregister_region(RegionId id) {
    if (!open_now()) return {Status::closed, 0, "deregister_region: the provider was closed"};
    if (id.value >= regions_.size() || !regions_[id.value])
        return invalid("region " + number(id.value) + " is not registered");
    LocalRegion& region = *regions_[id.value];
    if (region.in_flight != 0)
        return {Status::refused, 0,
                "region " + number(id.value) + " is in use by " + number(region.in_flight) + " operations"};
    RegionSlot& slot = mailbox().regions[region.slot];
    slot.registration.store(0, std::memory_order_seq_cst);
    // A writer that was stopped in the middle of its copy would write on when it wakes: its memory must not be reused.
    if (in_use(region.slot)) forgive_dead();
    if (in_use(region.slot)) {
        return {Status::would_block, 0, "region " + number(id.value) + ": a peer stands in the middle of a copy"};
    }
    free_slots_.push_back(region.slot);
    regions_[id.value].reset();
    return {};
}

std::vector<std::byte> LocalProvider::address(EndpointId endpoint) const {
    if (!open_now() || endpoint.value >= options_.endpoints) return {};
    return to_bytes(address_);
}

std::vector<std::byte> LocalProvider::region_key(RegionId id) const {
    if (!open_now() || id.value >= regions_.size() || !regions_[id.value]) return {};
    return to_bytes(key_of(*regions_[id.value]));
}

Key LocalProvider::key_of(const LocalRegion& region) {
    Key key;
    key.fd = region.file ? region.file.get() : -1;
    key.address = region.file ? 0 : reinterpret_cast<std::uintptr_t>(region.spec.address);
    key.slot = region.slot;
    key.access = (region.spec.remote_write ? 1u : 0u) | (region.spec.remote_read ? 2u : 0u);
    key.registration = region.registration;
    key.offset = region.spec.fd_offset;
    key.bytes = region.spec.bytes;
    return key;
}

ControlResult LocalProvider::add_peer(PeerId peer, std::span<const std::byte> address) {
    if (!open_now()) return {Status::closed, 0, "add_peer: the provider was closed"};
    if (peer.value >= kIdsMax) return invalid("peer id " + number(peer.value) + " is not below " + number(kIdsMax));
    auto entry = std::make_unique<Peer>();
    if (address.size() != sizeof(Address))
        return invalid("address of peer " + number(peer.value) + ": " + number(address.size()) + " bytes instead of " +
                       number(sizeof(Address)));
    std::memcpy(&entry->address, address.data(), sizeof(Address));
    if (entry->address.magic != Address{}.magic || entry->address.slots > kIdsMax)
        return invalid("address of peer " + number(peer.value) + " is not one of this version's local provider");
    if (peers_.size() <= peer.value) peers_.resize(peer.value + 1);
    if (peers_[peer.value]) {
        if (peers_[peer.value]->address.secret == entry->address.secret) return {};
        return {Status::refused, 0, "peer " + number(peer.value) + " is known under another address: remove it first"};
    }
    const std::string who = "peer " + number(peer.value) + " (process " + std::to_string(entry->address.pid) + ")";
    const std::size_t bytes = Mailbox::bytes_for(entry->address.slots);
    const File file = open_of(entry->address.pid, entry->address.mailbox);
    if (!file || !holds(file.get(), bytes)) {
        return {Status::refused, errno,
                who + " shares no memory with this process (" + (file ? "another file" : std::strerror(errno)) +
                    "): another host, container or user, or it has ended; use a libfabric provider"};
    }
    entry->mapping = Mapping::of(file.get(), 0, bytes);
    if (!entry->mapping) return failed("mmap of the mailbox of " + who, errno);
    if (entry->mailbox().magic != Mailbox::kMagic || entry->mailbox().secret != entry->address.secret) {
        return {
            Status::refused, 0,
            who +
                " shares no memory with this process (another process has its number here); use a libfabric provider"};
    }
    forgive_dead();
    set_fence(entry->address.name, false);
    entry->user = claim_user(entry->mailbox());
    if (entry->user == nullptr)
        return {
            Status::refused, 0,
            who + " is written to by " + number(kUsersMax) + " providers already, or /proc/self/stat cannot be read"};
    entry->socket_bytes = name_socket(entry->address.name, entry->socket);
    peers_[peer.value] = std::move(entry);
    return {};
}

bool LocalProvider::may_attach(Peer& peer) const {
    if (peer.attach != Attach::unknown) return peer.attach == Attach::allowed;
    peer.attach = Attach::refused;
    peer.process = File(static_cast<int>(syscall(SYS_pidfd_open, peer.address.pid, 0)));
    peer.attach_code = errno;
    if (!peer.process) return false;
    std::array<std::uint64_t, 2> head{};  // magic, secret
    const Copied copied =
        attached(peer, peer.address.box, reinterpret_cast<std::byte*>(head.data()), sizeof(head), OpKind::read);
    peer.attach_code = copied.code != 0 ? copied.code : EPERM;
    if (copied.status == Status::ok && head[0] == Mailbox::kMagic && head[1] == peer.address.secret)
        peer.attach = Attach::allowed;
    return peer.attach == Attach::allowed;
}

UserSlot* LocalProvider::claim_user(Mailbox& box) const {
    const std::uint64_t own = process_word(owner_);
    if (own == 0) return nullptr;
    for (UserSlot& user : box.users) {
        std::uint64_t nobody = 0;
        if (!user.process.compare_exchange_strong(nobody, own, std::memory_order_acq_rel)) continue;
        user.name.store(address_.name, std::memory_order_release);
        return &user;
    }
    return nullptr;
}

// Not in a forked child: the entry is its parent's.
void LocalProvider::release_user(Peer& peer) const {
    if (peer.user == nullptr || getpid() != owner_) return;
    peer.user->name.store(0, std::memory_order_relaxed);
    peer.user->fenced.store(0, std::memory_order_relaxed);
    peer.user->process.store(0, std::memory_order_release);
    peer.user = nullptr;
}

bool LocalProvider::in_use(std::uint32_t slot) const {
    return std::any_of(std::begin(mailbox().users), std::end(mailbox().users), [&](const UserSlot& user) {
        return user.using_slot.load(std::memory_order_seq_cst) == slot + 1;
    });
}

// Entries of processes that have ended: nothing of them writes any more.
void LocalProvider::forgive_dead() {
    for (UserSlot& user : mailbox().users) {
        const std::uint64_t word = user.process.load(std::memory_order_acquire);
        if (word == 0 || !has_ended(word)) continue;
        user.using_slot.store(0, std::memory_order_relaxed);
        user.name.store(0, std::memory_order_relaxed);
        user.fenced.store(0, std::memory_order_relaxed);
        user.process.store(0, std::memory_order_release);
    }
}

void LocalProvider::set_fence(std::uint64_t name, bool fenced) {
    for (UserSlot& user : mailbox().users) {
        if (user.name.load(std::memory_order_acquire) == name)
            user.fenced.store(fenced ? 1 : 0, std::memory_order_seq_cst);
    }
}

// What it is in the middle of goes on to its end: a count, or a piece of a copy.
void LocalProvider::fence_peer(PeerId peer) {
    if (open_now() && peer.value < peers_.size() && peers_[peer.value])
        set_fence(peers_[peer.value]->address.name, true);
}

bool LocalProvider::stands_in(PeerId peer, RegionId id) {
    if (!open_now() || peer.value >= peers_.size() || !peers_[peer.value]) return false;
    if (id.value >= regions_.size() || !regions_[id.value]) return false;
    const auto here = [&](const UserSlot& user) {
        return user.name.load(std::memory_order_acquire) == peers_[peer.value]->address.name &&
               user.using_slot.load(std::memory_order_seq_cst) == regions_[id.value]->slot + 1;
    };
    if (std::none_of(std::begin(mailbox().users), std::end(mailbox().users), here)) return false;
    forgive_dead();
    return std::any_of(std::begin(mailbox().users), std::end(mailbox().users), here);
}

ControlResult LocalProvider::remove_peer(PeerId peer) {
    if (!open_now()) return {Status::closed, 0, "remove_peer: the provider was closed"};
    if (peer.value >= peers_.size() || !peers_[peer.value])
        return invalid("peer " + number(peer.value) + " is not known");
    end_copies(Status::aborted, [&](const PostCommand& command) { return command.peer == peer; });
    for (auto& remote : remotes_) {
        if (remote && remote->peer == peer) remote.reset();
    }
    release_user(*peers_[peer.value]);
    peers_[peer.value].reset();
    return {};
}

void LocalProvider::end_copies(Status status, const std::function<bool(const PostCommand&)>& which) {
    for (std::size_t index = copies_.size(); index-- > 0;) {
        if (!which(copies_[index].command)) continue;
        finish(copies_[index].command, status);
        copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(index));
    }
}

void LocalProvider::forget_remote_region(RemoteRegionId id) {
    if (remote_of(id) == nullptr) return;
    end_copies(Status::bad_key, [&](const PostCommand& command) { return command.remote == id; });
    remotes_[row_of(id)].reset();
}

ControlResult LocalProvider::add_remote_region(PeerId peer, RemoteRegionId id, std::span<const std::byte> bytes) {
    if (!open_now()) return {Status::closed, 0, "add_remote_region: the provider was closed"};
    if (peer.value >= peers_.size() || !peers_[peer.value])
        return invalid("peer " + number(peer.value) + " is not known");
    const Address& owner = peers_[peer.value]->address;
    auto remote = std::make_unique<RemoteRegion>();
    remote->id = id;
    remote->peer = peer;
    const std::string what = "region of peer " + number(peer.value);
    if (bytes.size() != sizeof(Key))
        return invalid("key of a " + what + ": " + number(bytes.size()) + " bytes instead of " + number(sizeof(Key)));
    std::memcpy(&remote->key, bytes.data(), sizeof(Key));
    const Key& key = remote->key;
    if (key.magic != Key{}.magic || key.slot >= owner.slots || key.registration == 0 || key.bytes == 0 ||
        key.bytes > kCopyBytesMax)
        return invalid("key of a " + what + " is not one of this version's");
    for (const auto& copy : copies_) {
        if (copy.command.remote == id)
            return {Status::refused, 0, "remote region " + number(row_of(id)) + " is in use"};
    }
    if (remotes_.size() <= row_of(id)) remotes_.resize(row_of(id) + 1);
    const RemoteRegion* const old = remotes_[row_of(id)].get();
    if (old != nullptr && (old->peer != peer || old->id != id))
        return {Status::refused, 0, "remote region " + number(row_of(id)) + " belongs to another peer"};
    if (key.fd < 0 && (key.address == 0 || key.bytes > ~key.address))
        return invalid("key of a " + what + " names no memory that can be");
    remote->is = look_up(*peers_[peer.value], key);
    if (remote->is == KeyIs::forged)
        return {Status::refused, 0,
                "key of a " + what + " names other memory than its owner has registered under that number"};
    if (key.fd < 0 || remote->is == KeyIs::stale) {
        if (key.fd < 0 && !may_attach(*peers_[peer.value])) return cannot_attach(what, *peers_[peer.value]);
        remotes_[row_of(id)] = std::move(remote);
        return {};
    }
    const File file = open_of(owner.pid, key.fd);
    if (!file)
        return {Status::refused, errno,
                what + " cannot be opened: " + std::strerror(errno) + " (deregistered, or its process has ended)"};
    if (!holds(file.get(), key.offset + key.bytes)) return {Status::refused, 0, what + " is shorter than its key says"};
    remote->mapping = Mapping::of(file.get(), key.offset, key.bytes);
    if (!remote->mapping) return failed("mmap of a " + what, errno);
    remotes_[row_of(id)] = std::move(remote);
    return {};
}

void LocalProvider::close() {
    if (!open_now()) return;
    if (getpid() == owner_) {  // not in a forked child: the mailbox is its parent's
        for (std::uint32_t slot = 0; slot < options_.regions_max; ++slot) {
            mailbox().regions[slot].registration.store(0, std::memory_order_seq_cst);
        }
    }
    for (const auto& peer : peers_) {
        if (peer) release_user(*peer);
    }
    copies_.clear();
    done_.clear();
    remotes_.clear();
    peers_.clear();
    regions_.clear();
    mailbox_.reset();
    socket_.reset();
    file_.reset();
}

}  // namespace local

std::unique_ptr<Provider> open_local(const LocalOptions& options, ControlResult& result) {
    auto provider = std::make_unique<local::LocalProvider>(options);
    result = provider->open();
    if (!result.ok()) return nullptr;
    return provider;
}

std::byte* mapped_region(const Provider& provider, RemoteRegionId id) {
    const auto* local = dynamic_cast<const local::LocalProvider*>(&provider);
    return local != nullptr ? local->mapped(id) : nullptr;
}

}  // namespace expertwire
