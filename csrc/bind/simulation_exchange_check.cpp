// What a rank holds after a call against the oracle, byte by byte, and what lies around it against what lay there
// before.
#include <algorithm>
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
    const std::byte* const base = member.dispatch->results();
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
    if (wrong.empty()) wrong = compare("scales", base + extent.scales, expected.scales.data(), expected.scales.size());
    if (wrong.empty()) wrong = check_worst_tokens(rank, expected.rows);
    if (wrong.empty() && member.dispatch->expert_counts() != expected.expert_counts) wrong = "expert counts differ";
    if (wrong.empty()) wrong = check_handle(rank);
    if (wrong.empty())
        wrong =
            check_untouched(rank, part.offer_offset, part.offer_offset + std::min(extent.bytes, part.offer_capacity));
    return wrong;
}

// Of worst-token mode: ids behind the last row are -1, rows behind it were not written, and who overflowed is known.
std::string World::check_worst_tokens(std::uint32_t rank, std::uint64_t rows) const {
    const Member& member = members_[rank];
    const Call& call = script_.calls[member.call];
    std::vector<std::uint64_t> overflows;
    if (call.rows_max > 0 && call.routing < 0) {
        const std::vector<std::uint64_t> sent = rows_sent_to(script_, call);
        for (std::uint64_t to = 0; to < sent.size(); ++to) {
            if (sent[to] > call.rows_max) overflows.insert(overflows.end(), {to, sent[to]});
        }
    }
    std::vector<std::uint64_t> said;
    for (const auto& overflow : member.dispatch->overflows()) said.insert(said.end(), {overflow.rank, overflow.total});
    if (said != overflows) return "the list of ranks that overflowed differs";
    if (call.rows_max == 0) return {};
    const std::uint64_t offset = call.ranks[rank].offer_offset;
    const exchange::Extent extent = member.dispatch->extent();
    const std::uint64_t row = offset + extent.rows + rows * call.row_bytes;
    const std::uint64_t end = offset + extent.rows + call.rows_max * call.row_bytes;
    std::string wrong = compare("the tail of x", member.data.data() + row, member.before.data() + row, end - row);
    const std::uint64_t index = std::uint64_t{call.topk} * call.index_bytes;
    const Bytes none((call.rows_max - rows) * index, std::byte{0xFF});
    if (wrong.empty()) {
        wrong = compare("the tail of topk_idx", member.data.data() + offset + extent.indices + rows * index,
                        none.data(), none.size());
    }
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
                if (!routing.ranks[source].kept[token * ranks + to]) continue;
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

// ---- what lands over the fabric may lie only where its sender is the writer

// Rows for a rank that is a node of its own go straight to their final place in its data region.
bool World::owns_rows(const SimulatedNetwork::Landing& landing) const {
    const Member& target = members_[landing.target];
    if (nodes_.size(nodes_.node_of(landing.target)) != 1 || target.call == script_.calls.size()) return false;
    const Call& call = script_.calls[target.call];
    if (call.kind != exchange::Kind::dispatch) return false;
    const std::vector<std::uint64_t> matrix = routing_matrix(script_, routing_of(script_, call));
    std::uint64_t first = 0;
    for (std::uint32_t before = 0; before < landing.source; ++before) {
        first += matrix[before * nodes_.ranks() + landing.target];
    }
    const std::uint64_t rows = matrix[landing.source * nodes_.ranks() + landing.target];
    const std::uint64_t begin = call.ranks[landing.target].offer_offset + first * call.row_bytes;
    const std::uint64_t at = landing.command.remote_offset;
    return at >= begin && at + landing.command.bytes <= begin + rows * call.row_bytes;
}

bool World::owns_bytes(const SimulatedNetwork::Landing& landing) const {
    const PostCommand& command = landing.command;
    const std::uint32_t source = landing.source;
    const std::uint32_t target = landing.target;
    const auto region = static_cast<exchange::Region>(command.remote.value % 3);
    const exchange::Layout& layout = members_[target].exchange->layout();
    const auto inside = [&](std::uint64_t begin, std::uint64_t bytes) {
        return command.remote_offset >= begin && command.remote_offset + command.bytes <= begin + bytes;
    };
    if (region == exchange::Region::data) return owns_rows(landing);
    if (region == exchange::Region::control) {
        return inside(layout.notify_in(0, source), layout.notify_slot_bytes()) ||
               inside(layout.notify_in(1, source), layout.notify_slot_bytes());
    }
    const bool entered = nodes_.entry(source, nodes_.node_of(target)) == target;
    const bool homeward = nodes_.entry(target, nodes_.node_of(source)) == source;
    for (std::uint32_t slot = 0; slot < script_.ring_slots; ++slot) {
        if (entered && inside(layout.inner_slot(target, source, slot), script_.slot_bytes)) return true;
        if (homeward && inside(layout.outer_slot(target, nodes_.node_of(source), slot), script_.slot_bytes))
            return true;
    }
    return false;
}

bool World::owns_word(const SimulatedNetwork::Landing& landing) const {
    const std::uint32_t source = landing.source;
    const std::uint32_t target = landing.target;
    const std::uint64_t at = landing.command.remote_offset;
    if (landing.command.remote.value % 3 != 0) return false;
    const exchange::Layout& layout = members_[target].exchange->layout();
    if (at == layout.notified(0, source) || at == layout.notified(1, source)) return true;
    const bool entered = nodes_.entry(source, nodes_.node_of(target)) == target;
    const bool homeward = nodes_.entry(target, nodes_.node_of(source)) == source;
    if (entered && at == layout.credit_inner(source)) return true;
    if (homeward && at == layout.credit_outer(nodes_.node_of(source))) return true;
    for (std::uint32_t slot = 0; slot < script_.ring_slots; ++slot) {
        if (entered && at == layout.arrived_inner(source) + 8 * slot) return true;
        if (homeward && at == layout.arrived_outer(nodes_.node_of(source)) + 8 * slot) return true;
    }
    return false;
}

void World::check_landing(const SimulatedNetwork::Landing& landing) {
    const bool word = landing.command.kind == OpKind::signal;
    if (word ? owns_word(landing) : owns_bytes(landing)) return;
    fail(landing.source, std::string(word ? "added to a word" : "wrote bytes") + " at " +
                             std::to_string(landing.command.remote_offset) + " of a region of rank " +
                             std::to_string(landing.target) + " that is not its own to write");
}

std::string World::check_guards(std::uint32_t rank) const {
    for (const Bytes* region : {&members_[rank].control, &members_[rank].staging}) {
        for (std::size_t at = region->size() - 64; at < region->size(); ++at) {
            if ((*region)[at] != std::byte{0x5A}) return "a byte behind its control or staging region was overwritten";
        }
    }
    return {};
}

}  // namespace expertwire::simulation
