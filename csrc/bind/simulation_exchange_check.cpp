// What a rank holds after a call against the oracle, byte by byte, and what lies around it against what lay there
// before.
#include <cstring>

#include "bind/simulation_exchange_world.hpp"

namespace expertwire::simulation {

namespace {

std::string compare(const char* what, const std::byte* is, const std::byte* expected, std::uint64_t bytes) {
    if (bytes == 0 || std::memcmp(is, expected, bytes) == 0) return {};
    std::uint64_t at = 0;
    while (is[at] == expected[at]) ++at;
    return std::string(what) + " differs at byte " + std::to_string(at) + " of " + std::to_string(bytes);
}

}  // namespace

std::string World::check_untouched(std::uint32_t rank, std::uint64_t begin, std::uint64_t end) const {
    const Member& member = members_[rank];
    for (std::uint64_t at = 0; at < member.data.size(); ++at) {
        if (at == begin) at = end;
        if (at >= member.data.size()) break;
        if (member.data[at] != member.before[at])
            return "byte " + std::to_string(at) + " of its data region was overwritten";
    }
    return {};
}

std::string World::check_dispatch(std::uint32_t rank) const {
    const Member& member = members_[rank];
    const Call& call = script_.calls[member.call];
    const RankCall& part = call.ranks[rank];
    const Received expected = expected_dispatch(script_, call, rank);
    const exchange::Extent extent = member.dispatch->extent();
    const std::byte* const base = member.data.data() + part.offer_offset;
    if (member.dispatch->received() != expected.rows) {
        return "received " + std::to_string(member.dispatch->received()) + " rows, must be " +
               std::to_string(expected.rows);
    }
    std::string wrong = compare("x", base + extent.rows, expected.x.data(), expected.x.size());
    if (wrong.empty())
        wrong = compare("src_idx", base + extent.src_idx, expected.src_idx.data(), expected.src_idx.size());
    if (wrong.empty())
        wrong = compare("topk_idx", base + extent.indices, expected.indices.data(), expected.indices.size());
    if (wrong.empty()) {
        wrong = compare("topk_weights", base + extent.weights, expected.weights.data(), expected.weights.size());
    }
    if (wrong.empty() && member.dispatch->expert_counts() != expected.expert_counts) wrong = "expert counts differ";
    if (wrong.empty()) wrong = check_handle(rank);
    if (wrong.empty()) wrong = check_untouched(rank, part.offer_offset, part.offer_offset + extent.bytes);
    return wrong;
}

std::string World::check_handle(std::uint32_t rank) const {
    const Call& call = script_.calls[members_[rank].call];
    const std::shared_ptr<const exchange::Handle> handle = members_[rank].dispatch->handle();
    const Call& routing = routing_of(script_, call);
    const std::uint64_t ranks = nodes_.ranks();
    const std::vector<std::uint64_t> matrix = routing_matrix(script_, routing);
    for (std::size_t at = 0; at < matrix.size(); ++at) {
        if (handle->matrix[at] != matrix[at]) return "the handle's matrix differs";
    }
    const std::uint32_t node = nodes_.node_of(rank);
    for (std::uint32_t source = 0; source < ranks; ++source) {
        if (nodes_.node_of(source) == node || nodes_.entry(source, node) != rank) continue;
        std::vector<std::uint64_t> masks;
        for (std::uint64_t token = 0; token < routing.ranks[source].tokens; ++token) {
            std::vector<std::uint64_t> mask(nodes_.mask_words(node), 0);
            bool any = false;
            for (const std::uint32_t to : nodes_.members(node)) {
                if (!routing.ranks[source].in_rank[token * ranks + to]) continue;
                mask[nodes_.local_index(to) / 64] |= std::uint64_t{1} << (nodes_.local_index(to) % 64);
                any = true;
            }
            if (any) masks.insert(masks.end(), mask.begin(), mask.end());
        }
        if (handle->masks[source] != masks) return "the handle's masks of rank " + std::to_string(source) + " differ";
    }
    return {};
}

std::string World::check_combine(std::uint32_t rank) const {
    const Member& member = members_[rank];
    const Call& call = script_.calls[member.call];
    const RankCall& part = call.ranks[rank];
    const Combined expected = expected_combine(script_, call, rank);
    std::string wrong = compare("combined x", member.out.data(), expected.out.data(), expected.out.size());
    if (wrong.empty()) {
        wrong = compare("combined weights", reinterpret_cast<const std::byte*>(member.out_weights.data()),
                        reinterpret_cast<const std::byte*>(expected.weights.data()),
                        expected.weights.size() * sizeof(float));
    }
    if (wrong.empty()) wrong = check_untouched(rank, part.offer_offset, part.offer_offset + part.offer_capacity);
    return wrong;
}

}  // namespace expertwire::simulation
