#include "bind/simulation_exchange_script.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace expertwire::simulation {

namespace {

constexpr std::uint64_t kPad = 64;  // between what lies in a data region, to be found untouched

std::uint64_t rounded(std::uint64_t bytes) {
    return (bytes + 63) / 64 * 64;
}

void fill(Bytes& bytes, std::uint64_t count, Random& random) {
    bytes.resize(count);
    std::uint64_t at = 0;
    for (; at + 8 <= count; at += 8) {
        const std::uint64_t value = random.next();
        std::memcpy(bytes.data() + at, &value, 8);
    }
    for (; at < count; ++at) bytes[at] = static_cast<std::byte>(random.next());
}

// bf16 rows: mostly numbers of like size (so that the order of sums shows), now and then what is special.
void fill_bf16(Bytes& bytes, std::uint64_t count, Random& random) {
    static constexpr std::uint16_t special[] = {0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0,
                                                0xFFC1, 0x0001, 0x8001, 0x7F7F, 0xFF7F};
    const bool strange = random.chance(0.1);
    bytes.resize(count * 2);
    for (std::uint64_t at = 0; at < count; ++at) {
        const std::uint64_t draw = random.next();
        auto value = static_cast<std::uint16_t>((draw & 0x807F) | ((120 + (draw >> 20) % 12) << 7));
        if (strange && (draw >> 40) % 16 == 0) value = special[(draw >> 50) % std::size(special)];
        std::memcpy(bytes.data() + 2 * at, &value, 2);
    }
}

void fill_weights(std::vector<float>& weights, std::uint64_t count, Random& random) {
    weights.resize(count);
    for (float& weight : weights) weight = static_cast<float>(random.between(1, 1u << 20)) * 0x1.0p-20f;
}

void choose_nodes(Script& script, Random& random, Coverage& coverage) {
    const bool wide = random.chance(0.004);  // a node of more ranks than a word has bits
    const auto ranks = static_cast<std::uint32_t>(wide ? 70 : random.between(1, random.chance(0.3) ? 12 : 6));
    const auto nodes = static_cast<std::uint32_t>(wide ? 2 : random.between(1, std::min<std::uint32_t>(ranks, 4)));
    const std::uint64_t form = wide ? 3 : random.below(3);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        if (form == 0) {
            script.node_of.push_back(rank * nodes / ranks);  // neighbours
        } else if (form == 3) {
            script.node_of.push_back(rank % 32 == 0 ? 1 : 0);
        } else if (form == 1) {
            script.node_of.push_back(rank % nodes);  // dealt out
        } else {
            script.node_of.push_back(rank < nodes ? rank : static_cast<std::uint32_t>(random.below(nodes)));
        }
    }
    const exchange::NodeTable table(script.node_of);
    std::uint32_t smallest = ranks;
    std::uint32_t largest = 0;
    for (std::uint32_t node = 0; node < nodes; ++node) {
        smallest = std::min(smallest, table.size(node));
        largest = std::max(largest, table.size(node));
    }
    coverage["ranks_" + std::to_string(ranks)]++;
    coverage["nodes_" + std::to_string(nodes)]++;
    coverage["uneven_nodes"] += smallest != largest;
    coverage["mask_of_two_words"] += wide;
    coverage["scattered_nodes"] += !std::is_sorted(script.node_of.begin(), script.node_of.end());
}

// Experts per rank: as SPEC E9 says, or any rising table.
void choose_experts(const Script& script, Call& call, Random& random, Coverage& coverage) {
    const std::uint64_t ranks = script.node_of.size();
    call.num_experts = random.between(1, random.chance(0.3) ? ranks : script.local_experts_max * ranks);
    call.expert_first.assign(ranks + 1, 0);
    for (std::uint64_t rank = 0; rank <= ranks; ++rank) {
        call.expert_first[rank] = rank * (call.num_experts / ranks) + std::min(rank, call.num_experts % ranks);
    }
    coverage["fewer_experts_than_ranks"] += call.num_experts < ranks;
    coverage["uneven_experts"] += call.num_experts % ranks != 0;
}

std::uint32_t owner(const Call& call, std::int64_t expert) {
    const auto next =
        std::upper_bound(call.expert_first.begin(), call.expert_first.end(), static_cast<std::uint64_t>(expert));
    return static_cast<std::uint32_t>(next - call.expert_first.begin() - 1);
}

// How a rank's tokens choose their experts.
enum class Skew : std::uint8_t { uniform, one_rank, none, sparse };

void choose_routing(const Script& script, const Call& call, RankCall& part, Skew skew, Random& random,
                    Coverage& coverage) {
    const std::uint64_t ranks = script.node_of.size();
    part.in_rank.assign(part.tokens * ranks, 0);
    part.topk_idx.resize(part.tokens * call.topk * call.index_bytes);
    const std::uint64_t favourite = random.below(call.num_experts);
    for (std::uint64_t token = 0; token < part.tokens; ++token) {
        std::int64_t before = -1;
        for (std::uint32_t slot = 0; slot < call.topk; ++slot) {
            auto expert = static_cast<std::int64_t>(random.below(call.num_experts));
            if (skew == Skew::one_rank) expert = static_cast<std::int64_t>(favourite);
            if (skew == Skew::none || (skew == Skew::sparse && random.chance(0.7))) expert = -1;
            coverage["duplicate_ids"] += expert >= 0 && expert == before;
            before = expert;
            std::byte* const at = part.topk_idx.data() + (token * call.topk + slot) * call.index_bytes;
            const auto narrow = static_cast<std::int32_t>(expert);
            if (call.index_bytes == 4) std::memcpy(at, &narrow, 4);
            if (call.index_bytes == 8) std::memcpy(at, &expert, 8);
            if (expert >= 0) part.in_rank[token * ranks + owner(call, expert)] = 1;
        }
        // Without top-k the caller says by itself who gets a row.
        for (std::uint64_t rank = 0; rank < ranks && call.topk == 0; ++rank) {
            part.in_rank[token * ranks + rank] = skew != Skew::none && random.chance(0.4);
        }
    }
}

// Worst-token mode, now and then with too few rows for what comes.
void choose_rows_max(const Script& script, Call& call, Random& random, Coverage& coverage) {
    const std::uint64_t ranks = script.node_of.size();
    if (call.routing >= 0) {
        call.rows_max = routing_of(script, call).rows_max;
    } else if (call.topk > 0 && random.chance(0.3)) {
        const std::vector<std::uint64_t> sent = rows_sent_to(script, call);
        const std::uint64_t most = *std::max_element(sent.begin(), sent.end());
        call.rows_max = most + random.below(4);
        if (random.chance(0.5)) call.rows_max = random.between(1, most + 1);
        if (call.rows_max == 0) call.rows_max = 1;
        coverage["worst_tokens"]++;
        coverage["worst_tokens_overflow"] += call.rows_max < most;
    }
    coverage["worst_tokens_cached"] += call.routing >= 0 && call.rows_max > 0;
    for (RankCall& part : call.ranks) {
        part.kept = part.in_rank;
        part.rows_max = call.rows_max;
    }
    for (std::uint64_t to = 0; to < ranks && call.routing < 0 && call.rows_max > 0; ++to) {
        std::uint64_t row = 0;
        for (RankCall& part : call.ranks) {
            for (std::uint64_t token = 0; token < part.tokens; ++token) {
                std::uint8_t& kept = part.kept[token * ranks + to];
                if (kept != 0 && row++ >= call.rows_max) kept = 0;
            }
        }
    }
}

void make_dispatch(Script& script, Call& call, Random& random, Coverage& coverage) {
    const std::uint64_t ranks = script.node_of.size();
    call.kind = exchange::Kind::dispatch;
    call.row_bytes = random.chance(0.3) ? random.between(1, 40) : 2 * random.between(1, random.chance(0.1) ? 700 : 100);
    if (random.chance(0.3)) call.scale_bytes = 4 * static_cast<std::uint32_t>(random.between(1, 9));
    coverage["dispatch_scales"] += call.scale_bytes > 0;
    if (call.routing < 0) {
        call.topk = static_cast<std::uint32_t>(random.chance(0.2) ? 0 : random.between(1, 6));
        call.index_bytes = random.chance(0.5) ? 4 : 8;
        call.has_weights = call.topk > 0 && random.chance(0.6);
        choose_experts(script, call, random, coverage);
        coverage[call.index_bytes == 4 ? "index_i32" : "index_i64"] += call.topk > 0;
        coverage["dispatch_without_topk"] += call.topk == 0;
        coverage["dispatch_weights"] += call.has_weights;
    } else {
        coverage["dispatch_cached"]++;
    }
    const bool nobody = random.chance(0.04);
    const auto common = static_cast<Skew>(random.below(4));
    const bool alike = random.chance(0.5);
    const std::uint64_t tokens_max = random.chance(0.15) ? 40 : 10;
    std::uint64_t total = 0;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        RankCall part;
        part.tokens = nobody || random.chance(0.1) ? 0 : random.between(1, tokens_max);
        if (call.routing >= 0) part.tokens = script.calls[static_cast<std::size_t>(call.routing)].ranks[rank].tokens;
        part.row_bytes = call.row_bytes;
        part.has_weights = call.has_weights;
        fill(part.x, part.tokens * part.row_bytes, random);
        fill(part.scales, part.tokens * call.scale_bytes, random);
        if (call.routing < 0) {
            const Skew skew = alike ? common : static_cast<Skew>(random.below(4));
            choose_routing(script, call, part, skew, random, coverage);
            if (call.has_weights) fill_weights(part.weights, part.tokens * call.topk, random);
            coverage["rank_all_minus_one"] += skew == Skew::none && part.tokens > 0;
        }
        coverage["rank_without_tokens"] += part.tokens == 0;
        total += part.tokens;
        call.ranks.push_back(std::move(part));
    }
    choose_rows_max(script, call, random, coverage);
    coverage["nobody_has_tokens"] += total == 0;
    coverage["odd_row_bytes"] += call.row_bytes % 2;
}

void make_combine(Script& script, Call& call, Random& random, Coverage& coverage) {
    const std::uint64_t ranks = script.node_of.size();
    call.kind = exchange::Kind::combine;
    call.row_bytes = 2 * random.between(1, random.chance(0.1) ? 700 : 100);
    call.topk = static_cast<std::uint32_t>(random.chance(0.5) ? 0 : random.between(1, 6));
    call.has_weights = call.topk > 0;
    const Call& dispatch = routing_of(script, call);
    const std::vector<std::uint64_t> matrix = routing_matrix(script, dispatch);
    const bool all_in_place = random.chance(0.4);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        RankCall part;
        std::uint64_t rows = 0;
        for (std::uint32_t source = 0; source < ranks; ++source) rows += matrix[source * ranks + rank];
        part.tokens = dispatch.ranks[rank].tokens;
        part.row_bytes = call.row_bytes;
        part.has_weights = call.has_weights;
        fill_bf16(part.x, rows * call.row_bytes / 2, random);
        if (call.has_weights) fill_weights(part.weights, rows * call.topk, random);
        part.biases = static_cast<std::uint32_t>(random.below(3));
        if (part.biases > 0) fill_bf16(part.bias0, part.tokens * call.row_bytes / 2, random);
        if (part.biases > 1) fill_bf16(part.bias1, part.tokens * call.row_bytes / 2, random);
        part.x_in_place = all_in_place || random.chance(0.3);
        part.weights_in_place = random.chance(0.5);
        coverage["bias_" + std::to_string(part.biases)]++;
        coverage[part.x_in_place ? "combine_in_place" : "combine_copied"]++;
        coverage["combine_only_weights_copied"] += part.x_in_place && call.has_weights && !part.weights_in_place;
        call.ranks.push_back(std::move(part));
    }
    coverage["combine_weights"] += call.has_weights;
}

// Rows that the rank's extent has to hold.
std::uint64_t received_rows(const Script& script, const Call& call, std::uint32_t rank) {
    if (call.kind == exchange::Kind::dispatch && call.rows_max > 0) return call.rows_max;
    const std::vector<std::uint64_t> matrix = routing_matrix(script, routing_of(script, call));
    std::uint64_t rows = 0;
    for (std::uint64_t source = 0; source < script.node_of.size(); ++source)
        rows += matrix[source * script.node_of.size() + rank];
    return rows;
}

// Lays out the data region of each rank for this call: pad, offered extent, pad, input in place, pad, weights in place.
// Calls start at different places, so that what is left of older ones lies where new bytes belong.
// `rounds`: extents may be too small for all rows.
void place(Script& script, Call& call, Random& random, Coverage* rounds) {
    const bool narrow = rounds != nullptr && random.chance(0.25);
    for (std::uint32_t rank = 0; rank < script.node_of.size(); ++rank) {
        RankCall& part = call.ranks[rank];
        const std::uint64_t rows = received_rows(script, call, rank);
        const std::uint64_t bytes = call.kind == exchange::Kind::dispatch
                                        ? exchange::dispatch_extent(rows, call.row()).bytes
                                        : exchange::combine_extent(rows, call.row()).bytes;
        part.offer_offset = kPad + 64 * random.below(8);
        part.offer_capacity = bytes + 64 * random.below(3);
        if (rounds != nullptr && rows > 1 && call.rows_max == 0 && (narrow || random.chance(0.1))) {
            const std::uint64_t window = random.chance(0.3) ? 1 : random.between(1, rows - 1);
            part.offer_capacity = call.kind == exchange::Kind::dispatch
                                      ? exchange::dispatch_extent(window, call.row()).bytes
                                      : exchange::combine_extent(window, call.row()).bytes;
            (*rounds)["window_of_one_row"] += window == 1;
            (*rounds)["combine_in_rounds"] += call.kind == exchange::Kind::combine && !part.x_in_place;
        }
        part.x_offset = part.offer_offset + part.offer_capacity + kPad + 2 * random.below(16);
        part.weights_offset = rounded(part.x_offset + (part.x_in_place ? part.x.size() : 0)) + kPad;
        const std::uint64_t end =
            part.weights_offset + (part.weights_in_place ? part.weights.size() * sizeof(float) : 0) + kPad;
        script.data_bytes = std::max(script.data_bytes, rounded(end));
        script.slack_bytes = std::max(script.slack_bytes, rounded(4 * bytes + 65536));
    }
}

// Makes one rank disagree, or offer too little: every rank must find that out and say the same.
void spoil(Script& script, Call& call, Random& random, Coverage& coverage) {
    const auto victim = static_cast<std::uint32_t>(random.below(script.node_of.size()));
    RankCall& part = call.ranks[victim];
    if (random.chance(0.5)) {
        if (part.offer_capacity == 0 || received_rows(script, call, victim) == 0 ||
            call.kind != exchange::Kind::dispatch)
            return;
        const std::uint64_t rows = received_rows(script, call, victim);
        part.offer_capacity = exchange::dispatch_extent(call.rows_max > 0 ? rows : 1, call.row()).bytes - 64;
        call.outcome = Outcome::capacity;
        coverage["capacity_errors"]++;
    } else if (script.node_of.size() > 1 && call.kind == exchange::Kind::dispatch) {
        if (call.routing < 0 && call.topk > 0 && random.chance(0.3)) {
            part.rows_max += random.between(1, 3);
            coverage["mismatch_of_worst_tokens"]++;
        } else {
            part.row_bytes += 2;
            fill(part.x, part.tokens * part.row_bytes, random);
        }
        call.outcome = Outcome::mismatch;
        coverage["mismatch_errors"]++;
    }
}

std::uint64_t largest_row(const Script& script) {
    std::uint64_t largest = 0;
    for (const Call& call : script.calls) {
        largest = std::max(largest, call.row_bytes + 2 + call.scale_bytes + 8 + call.topk * std::uint64_t{12} + 4);
    }
    return largest;
}

}  // namespace

Script make_script(Random& random, Coverage& coverage) {
    Script script;
    choose_nodes(script, random, coverage);
    script.local_experts_max = static_cast<std::uint32_t>(random.between(1, 5));
    script.ring_slots = static_cast<std::uint32_t>(random.between(1, 4));
    std::vector<std::int32_t> dispatches;
    const std::uint64_t calls = random.between(3, 7);
    while (script.calls.size() < calls) {
        Call call;
        const bool again = !dispatches.empty() && random.chance(0.65);
        if (again) call.routing = dispatches[random.below(dispatches.size())];
        if (again && random.chance(0.7)) {
            make_combine(script, call, random, coverage);
        } else {
            make_dispatch(script, call, random, coverage);
        }
        script.calls.push_back(std::move(call));
        place(script, script.calls.back(), random, &coverage);
        Call& last = script.calls.back();
        if (random.chance(0.08)) spoil(script, last, random, coverage);
        if (last.kind == exchange::Kind::dispatch && last.routing < 0 && last.outcome == Outcome::success) {
            dispatches.push_back(static_cast<std::int32_t>(script.calls.size() - 1));
        }
    }
    script.slot_bytes = rounded(128 + largest_row(script) * random.between(1, 6));
    return script;
}

Script make_shape(const ShapeOptions& shape, Random& random, Coverage& coverage) {
    Script script;
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) script.node_of.push_back(rank / shape.ranks_per_node);
    script.local_experts_max = static_cast<std::uint32_t>((shape.experts + shape.ranks - 1) / shape.ranks);
    script.ring_slots = shape.ring_slots;
    const std::uint32_t words = (shape.ranks_per_node + 63) / 64;
    const auto capacity = [&](std::uint64_t slot_bytes) {
        return shape.combine
                   ? exchange::combine_chunk(slot_bytes, {shape.row_bytes}).capacity
                   : exchange::dispatch_chunk(slot_bytes, {shape.row_bytes, 0, shape.topk, 8, true}, words).capacity;
    };
    while (capacity(script.slot_bytes) < shape.chunk_rows) script.slot_bytes += 64;
    Call dispatch;
    dispatch.kind = exchange::Kind::dispatch;
    dispatch.row_bytes = shape.row_bytes;
    dispatch.topk = shape.topk;
    dispatch.has_weights = true;
    dispatch.num_experts = shape.experts;
    for (std::uint64_t rank = 0; rank <= shape.ranks; ++rank) {
        dispatch.expert_first.push_back(rank * (shape.experts / shape.ranks) +
                                        std::min(rank, shape.experts % shape.ranks));
    }
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
        RankCall part;
        part.tokens = shape.tokens;
        part.row_bytes = shape.row_bytes;
        part.has_weights = true;
        fill(part.x, part.tokens * part.row_bytes, random);
        choose_routing(script, dispatch, part, Skew::uniform, random, coverage);
        fill_weights(part.weights, part.tokens * shape.topk, random);
        dispatch.ranks.push_back(std::move(part));
    }
    for (RankCall& part : dispatch.ranks) part.kept = part.in_rank;
    script.calls.push_back(std::move(dispatch));
    place(script, script.calls.back(), random, nullptr);
    if (shape.combine) {
        Call combine;
        combine.kind = exchange::Kind::combine;
        combine.row_bytes = shape.row_bytes;
        combine.routing = 0;
        for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
            RankCall part;
            part.tokens = shape.tokens;
            part.row_bytes = shape.row_bytes;
            fill_bf16(part.x, received_rows(script, script.calls[0], rank) * shape.row_bytes / 2, random);
            part.x_in_place = true;
            combine.ranks.push_back(std::move(part));
        }
        script.calls.push_back(std::move(combine));
        place(script, script.calls.back(), random, nullptr);
    }
    script.slack_bytes = kPad;
    return script;
}

// ---- the oracle

const Call& routing_of(const Script& script, const Call& call) {
    return call.routing < 0 ? call : script.calls[static_cast<std::size_t>(call.routing)];
}

std::vector<std::uint64_t> routing_matrix(const Script& script, const Call& dispatch) {
    const std::uint64_t ranks = script.node_of.size();
    std::vector<std::uint64_t> matrix(ranks * ranks, 0);
    for (std::uint64_t source = 0; source < ranks; ++source) {
        const RankCall& part = dispatch.ranks[source];
        for (std::uint64_t at = 0; at < part.kept.size(); ++at) matrix[source * ranks + at % ranks] += part.kept[at];
    }
    return matrix;
}

std::vector<std::uint64_t> rows_sent_to(const Script& script, const Call& dispatch) {
    const std::uint64_t ranks = script.node_of.size();
    std::vector<std::uint64_t> sent(ranks, 0);
    for (const RankCall& part : dispatch.ranks) {
        for (std::uint64_t at = 0; at < part.in_rank.size(); ++at) sent[at % ranks] += part.in_rank[at];
    }
    return sent;
}

namespace {

template <class T>
void append(Bytes& to, T value) {
    const std::size_t at = to.size();
    to.resize(at + sizeof value);
    std::memcpy(to.data() + at, &value, sizeof value);
}

void append_ids(Received& received, const Call& call, const RankCall& part, std::uint64_t token, std::uint32_t rank) {
    if (call.topk == 0) return;
    const auto first = static_cast<std::int64_t>(call.expert_first[rank]);
    const auto end = static_cast<std::int64_t>(call.expert_first[rank + 1]);
    for (std::uint32_t slot = 0; slot < call.topk; ++slot) {
        const std::uint64_t at = token * call.topk + slot;
        std::int32_t narrow = 0;
        std::int64_t id = 0;
        if (call.index_bytes == 4) {
            std::memcpy(&narrow, part.topk_idx.data() + at * 4, 4);
            id = narrow;
        } else {
            std::memcpy(&id, part.topk_idx.data() + at * 8, 8);
        }
        const bool mine = id >= first && id < end;
        if (mine) ++received.expert_counts[static_cast<std::size_t>(id - first)];
        if (call.index_bytes == 4) append(received.indices, mine ? static_cast<std::int32_t>(id - first) : -1);
        if (call.index_bytes == 8) append(received.indices, mine ? id - first : std::int64_t{-1});
        if (call.has_weights) append(received.weights, mine ? part.weights[at] : 0.0f);
    }
}

float widen(const Bytes& rows, std::uint64_t at) {
    std::uint16_t value;
    std::memcpy(&value, rows.data() + 2 * at, 2);
    return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

// Of the two bf16 neighbours the nearer one, the even one in the middle.
std::uint16_t narrow(float value) {
    if (value != value) return 0x7FC0;
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t below = bits >> 16;
    const std::uint32_t rest = bits & 0xFFFF;
    const bool up = rest > 0x8000 || (rest == 0x8000 && (below & 1) == 1);
    return static_cast<std::uint16_t>(below + (up ? 1 : 0));
}

}  // namespace

Received expected_dispatch(const Script& script, const Call& call, std::uint32_t rank) {
    const std::uint64_t ranks = script.node_of.size();
    const Call& routing = routing_of(script, call);
    Received received;
    if (call.routing < 0) received.expert_counts.assign(call.expert_first[rank + 1] - call.expert_first[rank], 0);
    for (std::uint64_t source = 0; source < ranks; ++source) {
        const RankCall& part = call.ranks[source];
        for (std::uint64_t token = 0; token < part.tokens; ++token) {
            if (!routing.ranks[source].kept[token * ranks + rank]) continue;
            ++received.rows;
            const auto row = part.x.begin() + static_cast<std::ptrdiff_t>(token * call.row_bytes);
            received.x.insert(received.x.end(), row, row + static_cast<std::ptrdiff_t>(call.row_bytes));
            const auto scales = part.scales.begin() + static_cast<std::ptrdiff_t>(token * call.scale_bytes);
            received.scales.insert(received.scales.end(), scales, scales + call.scale_bytes);
            append(received.src_idx, static_cast<std::int32_t>(token));
            append_ids(received, call, part, token, rank);
        }
    }
    return received;
}

Combined expected_combine(const Script& script, const Call& call, std::uint32_t rank) {
    const std::uint64_t ranks = script.node_of.size();
    const std::uint64_t columns = call.row_bytes / 2;
    const Call& routing = routing_of(script, call);
    const RankCall& home = call.ranks[rank];
    const std::vector<std::uint64_t> matrix = routing_matrix(script, routing);
    std::vector<std::uint64_t> next(ranks, 0);  // row of the next token of mine at each rank
    for (std::uint64_t to = 0; to < ranks; ++to) {
        for (std::uint64_t before = 0; before < rank; ++before) next[to] += matrix[before * ranks + to];
    }
    const std::uint32_t nodes = *std::max_element(script.node_of.begin(), script.node_of.end()) + 1;
    Combined combined;
    for (std::uint64_t token = 0; token < home.tokens; ++token) {
        const std::uint8_t* const present = routing.ranks[rank].kept.data() + token * ranks;
        for (std::uint64_t column = 0; column < columns; ++column) {
            float acc = 0.0f;
            if (home.biases > 0) acc += widen(home.bias0, token * columns + column);
            if (home.biases > 1) acc += widen(home.bias1, token * columns + column);
            for (std::uint32_t node = 0; node < nodes; ++node) {
                float p = 0.0f;
                for (std::uint64_t from = 0; from < ranks; ++from) {
                    if (script.node_of[from] != node || !present[from]) continue;
                    p += widen(call.ranks[from].x, next[from] * columns + column);
                }
                if (node != script.node_of[rank]) p = std::bit_cast<float>(static_cast<std::uint32_t>(narrow(p)) << 16);
                acc += p;
            }
            append(combined.out, narrow(acc));
        }
        for (std::uint32_t slot = 0; slot < call.topk; ++slot) {
            float acc = 0.0f;
            for (std::uint32_t node = 0; node < nodes; ++node) {
                float p = 0.0f;
                for (std::uint64_t from = 0; from < ranks; ++from) {
                    if (script.node_of[from] != node || !present[from]) continue;
                    p += call.ranks[from].weights[next[from] * call.topk + slot];
                }
                acc += p;
            }
            combined.weights.push_back(acc);
        }
        for (std::uint64_t from = 0; from < ranks; ++from) next[from] += present[from];
    }
    return combined;
}

}  // namespace expertwire::simulation
