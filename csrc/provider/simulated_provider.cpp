// The face that one rank sees of the simulated network.
#include <algorithm>
#include <cstring>

#include "provider/simulated.hpp"

namespace expertwire {

namespace {

struct WireKey {
    std::uint32_t rank = 0;
    std::uint32_t region = 0;
    std::uint32_t generation = 0;
};

template <class Value>
std::vector<std::byte> to_bytes(const Value& value) {
    const auto* first = reinterpret_cast<const std::byte*>(&value);
    return {first, first + sizeof value};
}

template <class Value>
std::optional<Value> from_bytes(std::span<const std::byte> bytes) {
    if (bytes.size() != sizeof(Value)) return std::nullopt;
    Value value;
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
}

}  // namespace

SimulatedProvider::SimulatedProvider(SimulatedNetwork& network, std::uint32_t rank) : network_(network), rank_(rank) {
    capabilities_.provider = "simulated";
    capabilities_.ordering = network.model_.ordering;
    capabilities_.delivery_complete = network.model_.delivery_complete;
    capabilities_.remote_atomics = true;
    capabilities_.message_bytes_max = std::uint64_t{1} << 30;
    capabilities_.notification_bytes_max = 8192;
    capabilities_.transmit_queue = network.model_.transmit_queue;
    capabilities_.why = "simulated network: what the model says";
    if (network.model_.ordering != OrderingClass::counted_immediates) return;
    counted_ = std::make_unique<Counting>(network.model_.counted_tags, 256, network.model_.counting_patience,
                                          [this](PeerId source, const CountedSignal& signal) {
                                              return network_.land_counted(source.value, Ticket::unpack(signal.ticket));
                                          });
}

ControlResult SimulatedProvider::register_region(RegionId id, const RegionSpec& spec) {
    if (!id.valid() || (spec.address == nullptr && spec.bytes > 0)) {
        return {Status::invalid, 0, "register_region: no region id or no address"};
    }
    if (id.value >= regions_.size()) regions_.resize(id.value + 1);
    Registered& region = regions_[id.value];
    if (region.open)
        return {Status::refused, 0, "register_region: region " + std::to_string(id.value) + " is registered"};
    region.spec = spec;
    region.open = true;
    ++region.generation;
    return {};
}

ControlResult SimulatedProvider::deregister_region(RegionId id) {
    if (id.value >= regions_.size() || !regions_[id.value].open) {
        return {Status::invalid, 0, "deregister_region: region " + std::to_string(id.value) + " is not registered"};
    }
    regions_[id.value].open = false;
    return {};
}

std::vector<std::byte> SimulatedProvider::address(EndpointId) const {
    return to_bytes(rank_);
}

std::vector<std::byte> SimulatedProvider::region_key(RegionId id) const {
    const std::uint32_t generation = id.value < regions_.size() ? regions_[id.value].generation : 0;
    return to_bytes(WireKey{rank_, id.value, generation});
}

ControlResult SimulatedProvider::add_peer(PeerId peer, std::span<const std::byte> address) {
    const auto rank = from_bytes<std::uint32_t>(address);
    if (!rank || *rank >= network_.ranks()) return {Status::invalid, 0, "add_peer: not an address of this network"};
    if (peer.value >= peers_.size()) peers_.resize(peer.value + 1);
    peers_[peer.value] = *rank;
    // Whoever is added again is taken for another process: what the old one still sends must change nothing.
    if (counted_) counted_->meet(peer, ++meetings_);
    return {};
}

ControlResult SimulatedProvider::remove_peer(PeerId peer) {
    if (peer.value >= peers_.size() || !peers_[peer.value]) return {Status::invalid, 0, "remove_peer: unknown peer"};
    const std::uint32_t target = *peers_[peer.value];
    network_.drop_flights([&](const SimulatedNetwork::Flight& f) { return f.source == rank_ && f.target == target; });
    if (counted_) {
        counted_->leave(peer);
        abandon([&](const PostCommand& command) { return command.peer == peer; });
    }
    peers_[peer.value].reset();
    return {};
}

ControlResult SimulatedProvider::add_remote_region(PeerId peer, RemoteRegionId id, std::span<const std::byte> key) {
    const auto wire = from_bytes<WireKey>(key);
    if (!wire || peer.value >= peers_.size() || peers_[peer.value] != wire->rank) {
        return {Status::invalid, 0, "add_remote_region: not a key of that peer"};
    }
    if (id.value >= remotes_.size()) remotes_.resize(id.value + 1);
    remotes_[id.value] = {wire->rank, RegionId{wire->region}, wire->generation, true};
    return {};
}

PostResult SimulatedProvider::post(const PostCommand& command) {
    const bool counted =
        counted_ && command.kind == OpKind::write && (command.counted.valid() || !capabilities_.delivery_complete);
    const bool counting = counted_ && command.kind == OpKind::signal && command.counted.valid();
    const PostResult result = counted    ? post_counted(command)
                              : counting ? post_counting(command)
                                         : network_.post(rank_, command, {});
    counters_.posted += result.outcome == PostOutcome::posted;
    counters_.again += result.outcome == PostOutcome::again;
    counters_.failed += result.outcome == PostOutcome::failed;
    return result;
}

std::size_t SimulatedProvider::poll(std::span<Completion> completions, std::vector<Arrival>& arrivals) {
    while (!arrivals_.empty()) {
        arrivals.push_back(std::move(arrivals_.front()));
        arrivals_.pop_front();
    }
    if (counted_) poll_counted();
    std::size_t count = 0;
    while (count < completions.size() && !completions_.empty()) {
        completions[count++] = completions_.front();
        completions_.pop_front();
    }
    return count;
}

void SimulatedProvider::close() {
    closed_ = true;
    network_.drop_flights([&](const SimulatedNetwork::Flight& f) { return f.source == rank_; });
    completions_.clear();
}

void SimulatedProvider::close_endpoint(EndpointId endpoint) {
    closed_endpoints_.push_back(endpoint);
    network_.drop_flights(
        [&](const SimulatedNetwork::Flight& f) { return f.source == rank_ && f.command.endpoint == endpoint; });
    if (counted_) abandon([&](const PostCommand& command) { return command.endpoint == endpoint; });
}

std::byte* SimulatedProvider::memory(RegionId id, std::uint64_t offset) const {
    if (id.value >= regions_.size() || !regions_[id.value].open) return nullptr;
    const Registered& region = regions_[id.value];
    return offset <= region.spec.bytes ? region.spec.address + offset : nullptr;
}

}  // namespace expertwire
