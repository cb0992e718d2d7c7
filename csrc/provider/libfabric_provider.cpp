// Opening, regions and peers.
#include "provider/libfabric_provider.hpp"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>

#include "provider/capabilities_table.hpp"
#include "provider/kernel_copies.hpp"

namespace expertwire::fabric {
namespace {

constexpr std::uint32_t kEndpointsMax = 64, kIdsMax = 1u << 20;
constexpr std::uint32_t kSendBuffers = 64, kWords = 4;  // for each half: moved, greeting

std::string number(std::uint64_t value) {
    return std::to_string(value);
}

ControlResult invalid(const std::string& message) {
    return {Status::invalid, 0, message};
}

}  // namespace

LibfabricProvider::LibfabricProvider(std::shared_ptr<const LibfabricLibrary> library, Info info,
                                     const LibfabricOptions& options)
    : library_(std::move(library)),
      info_(std::move(info)),
      options_(options),
      owner_(getpid()),
      objects_(std::make_unique<Objects>()) {
    capabilities_ = describe(*info_, options_);
    leads_ = core_of(capabilities_.provider) == "tcp" && copies_slowly_when_ahead();
}

LibfabricProvider::~LibfabricProvider() {
    close();
}

ControlResult LibfabricProvider::open() {
    if (options_.endpoints == 0 || options_.endpoints > kEndpointsMax) {
        return invalid("endpoints=" + number(options_.endpoints) + " is outside 1.." + number(kEndpointsMax));
    }
    if ((info_->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0 && options_.endpoints != 1) {
        return invalid(
            "provider \"" + capabilities_.provider +
            "\" binds regions to one endpoint (FI_MR_ENDPOINT), but endpoints=" + number(options_.endpoints));
    }
    if (getrandom(&instance_, sizeof(instance_), 0) != sizeof(instance_)) return failure(*library_, "getrandom", errno);
    info_->tx_attr->op_flags = 0;  // every post says what it wants
    if (options_.transmit_queue != 0 && options_.transmit_queue < info_->tx_attr->size) {
        info_->tx_attr->size = options_.transmit_queue;
    }
    int code = library_->calls().fabric(info_->fabric_attr, objects_->fabric.out(), nullptr);
    if (code != 0) return failure(*library_, "fi_fabric(" + capabilities_.provider + ")", code);
    code = fi_domain(objects_->fabric.get(), info_.get(), objects_->domain.out(), nullptr);
    if (code != 0) return failure(*library_, "fi_domain(" + std::string(info_->domain_attr->name) + ")", code);
    objects_->queues.resize(replaceable() ? 2 : 1);
    if (ControlResult result = open_queue(0); !result.ok()) return result;
    const bool keeps = rules_of(capabilities_.provider).keeps_addresses;
    code = objects_->addresses.open(objects_->domain.get(), info_->domain_attr->av_type, keeps);
    if (code != 0) return failure(*library_, "fi_av_open", code);
    const std::uint32_t places = options_.endpoints * (replaceable() ? 2 : 1);
    objects_->endpoints.resize(places);
    objects_->sets.resize(places);
    in_flight_.assign(places, 0);
    for (std::uint32_t index = 0; index < options_.endpoints; ++index) {
        if (ControlResult result = open_endpoint(index); !result.ok()) return result;
    }
    return open_messages();
}

ControlResult LibfabricProvider::open_queue(std::uint32_t half) {
    Handle<fid_cq>& queue = objects_->queues[half];
    fi_cq_attr attributes{};
    attributes.format = FI_CQ_FORMAT_DATA;
    attributes.size = std::size_t{options_.slots} + 2 * std::size_t{options_.endpoints} * options_.receive_buffers + 64;
    attributes.wait_obj = FI_WAIT_FD;
    int code = fi_cq_open(objects_->domain.get(), &attributes, queue.out(), nullptr);
    if (code == 0) {
        if (fi_control(&queue->fid, FI_GETWAIT, &wait_fd_) != 0) wait_fd_ = -1;
    } else {  // without a descriptor polling is bounded by time
        attributes.wait_obj = FI_WAIT_NONE;
        code = fi_cq_open(objects_->domain.get(), &attributes, queue.out(), nullptr);
        if (code != 0) return failure(*library_, "fi_cq_open(size " + number(attributes.size) + ")", code);
    }
    capabilities_.waits_on_descriptor = wait_fd_ >= 0;
    return {};
}

ControlResult LibfabricProvider::open_endpoint(std::uint32_t index) {
    Handle<fid_ep>& endpoint = objects_->endpoints[index];
    int code = fi_endpoint(objects_->domain.get(), info_.get(), endpoint.out(), nullptr);
    if (code != 0) return failure(*library_, "fi_endpoint", code);
    code = fi_ep_bind(endpoint.get(), &objects_->addresses.get()->fid, 0);
    if (code != 0) return failure(*library_, "fi_ep_bind(av)", code);
    code = fi_ep_bind(endpoint.get(), &queue_of(index)->fid, FI_TRANSMIT | FI_RECV);
    if (code != 0) return failure(*library_, "fi_ep_bind(cq)", code);
    code = fi_enable(endpoint.get());
    if (code != 0) return failure(*library_, "fi_enable", code);
    return {};
}

ControlResult LibfabricProvider::open_messages() {
    message_bytes_ = sizeof(MessageHeader) + capabilities_.notification_bytes_max;
    objects_->message_memory.resize((std::size_t{kSendBuffers} + kWords) * message_bytes_);
    objects_->contexts.resize(options_.slots);
    objects_->notices.resize(kNotices);
    for (std::uint32_t index = 0; index < kNotices; ++index) {
        objects_->notices[index].role = OperationContext::Role::notice;
        objects_->notices[index].index = index;
        free_notices_.push_back(index);
    }
    for (std::uint32_t slot = 0; slot < options_.slots; ++slot) objects_->contexts[slot].index = slot;
    for (std::uint32_t index = 0; index < kSendBuffers; ++index) free_bounces_.push_back(index);
    if (capabilities_.local_registration) {
        const auto bytes_of = [](const auto& list) { return list.size() * sizeof(list[0]); };
        const std::uint64_t access = FI_SEND | FI_RECV | FI_WRITE;
        ControlResult result = register_memory(objects_->message_memory.data(), objects_->message_memory.size(), access,
                                               objects_->message_registration);
        if (result.ok()) {
            result = register_memory(objects_->contexts.data(), bytes_of(objects_->contexts), access,
                                     objects_->context_registration);
        }
        if (result.ok()) {
            result = register_memory(objects_->notices.data(), bytes_of(objects_->notices), access,
                                     objects_->notice_registration);
        }
        if (!result.ok()) return result;
    }
    for (std::uint32_t index = 0; index < options_.endpoints; ++index) {
        if (ControlResult result = open_message_set(index); !result.ok()) return result;
    }
    immediate_.reserve(options_.slots);
    if (capabilities_.ordering == OrderingClass::counted_immediates) open_counting();
    post_receives();
    return write_words(0, 0);
}

ControlResult LibfabricProvider::open_message_set(std::uint32_t endpoint) {
    MessageSet& set = objects_->sets[endpoint];
    set.memory.resize(std::size_t{options_.receive_buffers} * message_bytes_);
    set.receives.resize(options_.receive_buffers);
    set.answers.resize(options_.receive_buffers);
    if (capabilities_.local_registration && options_.receive_buffers != 0) {
        const std::uint64_t access = FI_SEND | FI_RECV;
        ControlResult result = register_memory(set.memory.data(), set.memory.size(), access, set.memory_registration);
        if (result.ok()) {
            result = register_memory(set.answers.data(), set.answers.size() * sizeof(set.answers[0]), access,
                                     set.answer_registration);
        }
        if (!result.ok()) {
            set = MessageSet{};
            return result;
        }
    }
    for (std::uint32_t index = 0; index < options_.receive_buffers; ++index) {
        for (auto* context : {&set.receives[index], &set.answers[index]}) {
            context->index = index;
            context->endpoint = context->set = endpoint;
        }
        set.receives[index].role = OperationContext::Role::receive;
        set.answers[index].role = OperationContext::Role::answer;
        idle_receives_.push_back(&set.receives[index]);
    }
    return {};
}

ControlResult LibfabricProvider::register_memory(const void* address, std::size_t bytes, std::uint64_t access,
                                                 Handle<fid_mr>& handle) {
    const int mode = info_->domain_attr->mr_mode;
    // Keys of our own are never used twice; keys that the provider picks are told apart by the registration's number.
    const std::uint64_t key = (mode & FI_MR_PROV_KEY) != 0 ? 0 : next_key_++;
    int code = fi_mr_reg(objects_->domain.get(), address, bytes, access, 0, key, 0, handle.out(), nullptr);
    if (code != 0) return failure(*library_, "fi_mr_reg(" + number(bytes) + " bytes)", code);
    if ((mode & FI_MR_ENDPOINT) == 0) return {};
    code = fi_mr_bind(handle.get(), &objects_->endpoints[0]->fid, 0);
    if (code == 0) code = fi_mr_enable(handle.get());
    return code == 0 ? ControlResult{} : failure(*library_, "fi_mr_bind(endpoint)", code);
}

ControlResult LibfabricProvider::register_region(RegionId id, const RegionSpec& spec) {
    if (!objects_) return {Status::closed, 0, "register_region: the provider was closed"};
    if (id.value >= kIdsMax) return invalid("region id " + number(id.value) + " is not below " + number(kIdsMax));
    if (spec.address == nullptr || spec.bytes == 0)
        return invalid("region " + number(id.value) + ": empty memory cannot be registered");
    if (objects_->regions.size() <= id.value) objects_->regions.resize(id.value + 1);
    if (objects_->regions[id.value])
        return {Status::refused, 0, "region " + number(id.value) + " is registered already"};
    auto region = std::make_unique<LocalRegion>();
    region->spec = spec;
    region->number = next_registration_++;
    const std::uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | (spec.remote_write ? FI_REMOTE_WRITE : 0) |
                                 (spec.remote_read ? FI_REMOTE_READ : 0);
    ControlResult result = register_memory(spec.address, spec.bytes, access, region->registration);
    if (!result.ok()) return result;
    region->descriptor = capabilities_.local_registration ? fi_mr_desc(region->registration.get()) : nullptr;
    objects_->regions[id.value] = std::move(region);
    return {};
}

ControlResult LibfabricProvider::deregister_region(RegionId id) {
    if (!objects_) return {Status::closed, 0, "deregister_region: the provider was closed"};
    if (id.value >= objects_->regions.size() || !objects_->regions[id.value]) {
        return invalid("region " + number(id.value) + " is not registered");
    }
    LocalRegion& region = *objects_->regions[id.value];
    if (region.in_flight != 0) {
        return {Status::refused, 0,
                "region " + number(id.value) + " is in use by " + number(region.in_flight) + " operations"};
    }
    if (region.state == LocalRegion::State::registered) start_revoking(region, id.value);
    std::erase_if(region.unanswered, [&](std::uint64_t instance) { return !by_instance_.contains(instance); });
    if (on_its_way(revocation_of(region, id.value, instance_)))
        return {Status::would_block, 0,
                "region " + number(id.value) + ": operations of our own are on their way there"};
    if (!region.unanswered.empty()) {
        return {Status::would_block, 0,
                "region " + number(id.value) + ": peer " + number(by_instance_.at(region.unanswered[0]).value) +
                    " has not yet said that nothing of its own is on the way there"};
    }
    fid_mr* registration = region.registration.get();
    const int code = fi_close(&registration->fid);
    if (code != 0) return failure(*library_, "fi_close(region " + number(id.value) + ")", code);
    region.registration.abandon();  // closed by hand, for the sake of its code
    objects_->regions[id.value].reset();
    return {};
}

std::vector<std::byte> LibfabricProvider::region_key(RegionId id) const {
    if (!objects_ || id.value >= objects_->regions.size() || !objects_->regions[id.value]) return {};
    return to_bytes(key_of(id.value));
}

std::vector<std::byte> LibfabricProvider::address(EndpointId endpoint) const {
    // One blob reaches every endpoint; the argument says which one a peer should see first when there are rails.
    if (!objects_ || endpoint.value >= objects_->endpoints.size()) return {};
    AddressHeader header;
    header.endpoints = options_.endpoints;
    header.instance = instance_;
    header.replacements = replacements_;
    std::vector<std::byte> blob = to_bytes(header);
    for (std::uint32_t index = 0; index < options_.endpoints; ++index) {
        const std::uint32_t which = current_ + lane_of(endpoint.value + index);
        std::vector<std::byte> name;
        if (!name_of(which, name).ok()) return {};
        const auto bytes = to_bytes(static_cast<std::uint32_t>(name.size()));
        blob.insert(blob.end(), bytes.begin(), bytes.end());
        blob.insert(blob.end(), name.begin(), name.end());
    }
    return blob;
}

ControlResult LibfabricProvider::name_of(std::uint32_t endpoint, std::vector<std::byte>& name) const {
    name.resize(kNameBytesMax);
    std::size_t length = name.size();
    const int code = fi_getname(&objects_->endpoints[endpoint]->fid, name.data(), &length);
    if (code != 0) return failure(*library_, "fi_getname", code);
    name.resize(std::min(length, name.size()));
    return {};
}

NameFormat LibfabricProvider::name_format() const {
    std::vector<std::byte> name;
    const bool text = info_->addr_format == FI_ADDR_STR;
    return {name_of(current_, name).ok() ? name.size() : 0, text};
}

ControlResult LibfabricProvider::add_peer(PeerId peer, std::span<const std::byte> address) {
    if (!objects_) return {Status::closed, 0, "add_peer: the provider was closed"};
    if (peer.value >= kIdsMax) return invalid("peer id " + number(peer.value) + " is not below " + number(kIdsMax));
    AddressHeader header;
    const std::string what = "address of peer " + number(peer.value) + ": ";
    if (address.size() < sizeof(header))
        return invalid(what + number(address.size()) + " bytes, shorter than its header");
    std::memcpy(&header, address.data(), sizeof(header));
    if (header.magic != AddressHeader{}.magic || header.endpoints == 0 || header.endpoints > kEndpointsMax) {
        return invalid(what + "not one of this version's libfabric provider");
    }
    if (peers_.size() <= peer.value) peers_.resize(peer.value + 1);
    if (peers_[peer.value]) {
        if (peers_[peer.value]->instance == header.instance) return {};
        return {Status::refused, 0, "peer " + number(peer.value) + " is known under another address: remove it first"};
    }
    auto entry = std::make_unique<Peer>();
    entry->instance = header.instance;
    entry->move_number = header.replacements;
    const EndpointNames names = split_names(address.subspan(sizeof(header)), header.endpoints, name_format());
    if (!names.wrong.empty()) return invalid(what + names.wrong);
    const int code = objects_->addresses.insert(names.names, entry->addresses);
    if (code == -FI_ENOSPC) {
        return {Status::refused, 0,
                "peer " + number(peer.value) + ": \"" + capabilities_.provider +
                    "\" takes no more addresses than the " + number(objects_->addresses.kept()) +
                    " that this endpoint has met in its life (it keeps those of removed peers): make a new endpoint"};
    }
    if (code != 0) return failure(*library_, "fi_av_insert(peer " + number(peer.value) + ")", code);
    by_instance_[header.instance] = peer;
    // Who receives no messages cannot be told anything.
    if (header.instance == instance_ || options_.receive_buffers == 0) entry->move = Peer::Move::settled;
    if (header.instance != instance_) ungreeted_.push_back({header.instance});
    removed_instances_.erase(header.instance);
    if (counted_) counted_->meet(peer, header.instance);
    peers_[peer.value] = std::move(entry);
    return {};
}

ControlResult LibfabricProvider::remove_peer(PeerId peer) {
    if (!objects_) return {Status::closed, 0, "remove_peer: the provider was closed"};
    if (peer.value >= peers_.size() || !peers_[peer.value])
        return invalid("peer " + number(peer.value) + " is not known");
    for (RemoteRegion& region : remotes_) {
        // What is in flight completes later and is counted down: the number of this entry stays.
        if (region.peer == peer) region.state = RemoteRegion::State::unknown;
    }
    std::unique_ptr<Peer> entry = std::move(peers_[peer.value]);
    by_instance_.erase(entry->instance);
    removed_instances_.insert(entry->instance);
    entry->removed = true;
    take_what_was_put_off();  // what waits for this one is given up by the next poll
    end_unanswered(*entry);
    if (counted_) counted_->leave(peer);
    std::erase_if(retired_, [&](const std::unique_ptr<Peer>& old) { return old->in_flight == 0; });
    free_peer(*entry);
    if (entry->in_flight != 0) retired_.push_back(std::move(entry));
    return {};
}

void LibfabricProvider::forsake_peer(PeerId peer) {
    if (objects_ && peer.value < peers_.size() && peers_[peer.value]) end_unanswered(*peers_[peer.value]);
}

// Emulated signals and counted writes whose answer will not come any more; libfabric is done with them.
void LibfabricProvider::end_unanswered(const Peer& peer) {
    for (OperationContext& context : objects_->contexts) {
        if (context.peer != &peer || context.state != OperationContext::State::unanswered) continue;
        context.state = OperationContext::State::idle;
        uncount(context);
        immediate_.push_back({context.ticket, Status::peer_dead, context.level, 0});
    }
}

// fi_av_remove needs an address that nothing uses (fi_av(3)); until then the entry stays and only new posts are
// refused.
void LibfabricProvider::free_peer(Peer& peer) {
    if (!peer.removed || peer.in_flight != 0 || peer.addresses.empty()) return;
    for (const auto* more : {&peer.next, &peer.before})
        peer.addresses.insert(peer.addresses.end(), more->begin(), more->end());
    objects_->addresses.remove(peer.addresses);
}

ControlResult LibfabricProvider::add_remote_region(PeerId peer, RemoteRegionId id, std::span<const std::byte> key) {
    if (!objects_) return {Status::closed, 0, "add_remote_region: the provider was closed"};
    if (peer.value >= peers_.size() || !peers_[peer.value])
        return invalid("peer " + number(peer.value) + " is not known");
    RemoteRegion region{.id = id, .peer = peer, .key = {}, .state = RemoteRegion::State::asked, .in_flight = 0};
    if (key.size() != sizeof(region.key)) {
        return invalid("key of a region of peer " + number(peer.value) + ": " + number(key.size()) +
                       " bytes instead of " + number(sizeof(region.key)));
    }
    std::memcpy(&region.key, key.data(), sizeof(region.key));
    if (region.key.magic != RegionKey{}.magic)
        return invalid("key of a region of peer " + number(peer.value) + " is not one of this version's");
    if (remotes_.size() <= row_of(id)) remotes_.resize(row_of(id) + 1);
    RemoteRegion& old = remotes_[row_of(id)];
    if (old.state != RemoteRegion::State::unknown && (old.peer != peer || old.id != id)) {
        return {Status::refused, 0,
                "remote region " + number(row_of(id)) + " belongs to peer " + number(old.peer.value)};
    }
    region.in_flight = old.in_flight;
    // Who receives no messages cannot be asked.
    if (options_.receive_buffers == 0) region.state = RemoteRegion::State::known;
    if (peers_[peer.value]->instance == instance_)
        region.state = is_ours(inquiry_of(region.key)) ? RemoteRegion::State::known : RemoteRegion::State::revoked;
    old = region;
    if (region.state == RemoteRegion::State::asked) unasked_.push_back(id);
    return {};
}

void LibfabricProvider::forget_remote_region(RemoteRegionId id) {
    if (RemoteRegion* const region = objects_ ? remote_of(id) : nullptr) region->state = RemoteRegion::State::unknown;
}

void LibfabricProvider::close() {
    if (!objects_) return;
    if (getpid() != owner_) {  // a forked child: these descriptors and connections are its parent's
        static_cast<void>(objects_.release());
        return;
    }
    objects_.reset();
    retired_.clear();
    peers_.clear();
    by_instance_.clear();
    remotes_.clear();
    put_off_notices_.clear();
    put_off_answers_.clear();
    unasked_.clear();
    asked_.clear();
    wait_fd_ = -1;
}

}  // namespace expertwire::fabric

namespace expertwire {

std::unique_ptr<Provider> open_libfabric(const LibfabricOptions& options, ControlResult& result) {
    const auto library = load_libfabric(options.libraries, result);
    if (!library) return nullptr;
    fabric::Info info = fabric::select_info(library, options, result);
    if (!info) return nullptr;
    auto provider = std::make_unique<fabric::LibfabricProvider>(library, std::move(info), options);
    result = provider->open();
    if (!result.ok()) return nullptr;
    return provider;
}

}  // namespace expertwire
