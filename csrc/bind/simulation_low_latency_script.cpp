#include "bind/simulation_low_latency_script.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "rows/rows.hpp"

namespace expertwire::simulation {

namespace {

using exchange::Kind;
using exchange::LowLatencyCall;
using exchange::RowFormat;

std::uint16_t small_bf16(std::uint64_t bits) {  // −8 … 8 in sixteenths: exact, and sums of it round
    return rows::round_bf16(static_cast<float>(static_cast<std::int64_t>(bits % 257) - 128) / 16.0f);
}

LowLatencyCall make_call(Random& random, std::uint32_t ranks, Coverage& coverage) {
    LowLatencyCall call;
    call.tokens_max = random.between(1, 6);
    static constexpr std::uint64_t widths[] = {1, 8, 127, 128, 200, 520};
    call.hidden = widths[random.below(std::size(widths))];
    call.num_experts = random.chance(0.3) ? random.between(1, ranks) : random.between(ranks, 3 * ranks + 1);
    call.topk = static_cast<std::uint32_t>(random.between(1, 5));
    call.format = static_cast<RowFormat>(random.below(4));
    for (std::uint64_t rank = 0; rank <= ranks; ++rank) {
        call.expert_first.push_back(rank * (call.num_experts / ranks) + std::min(rank, call.num_experts % ranks));
    }
    coverage["uneven_experts"] += call.num_experts % ranks != 0;
    coverage["fewer_experts_than_ranks"] += call.num_experts < ranks;
    coverage["format_" + std::to_string(static_cast<int>(call.format))] += 1;
    return call;
}

LowLatencyPart make_part(Random& random, const LowLatencyCall& call, Coverage& coverage) {
    LowLatencyPart part;
    part.tokens = random.chance(0.2) ? 0 : random.between(1, call.tokens_max);
    const bool none = random.chance(0.1);
    coverage["rank_without_tokens"] += part.tokens == 0;
    coverage["rank_all_minus_one"] += none && part.tokens > 0;
    std::vector<std::uint64_t> of_expert(call.num_experts, 0);
    std::vector<std::uint64_t> of_rank(call.expert_first.size(), 0);
    for (std::uint64_t slot = 0; slot < part.tokens * call.topk; ++slot) {
        std::int64_t id = -1;
        if (!none && !random.chance(0.2)) {
            const std::uint64_t expert = random.below(call.num_experts);
            const auto owner = std::upper_bound(call.expert_first.begin(), call.expert_first.end(), expert);
            const auto rank = static_cast<std::uint32_t>(owner - call.expert_first.begin() - 1);
            const std::uint64_t token = slot / call.topk * call.topk;
            const bool again = std::find(part.ids.begin() + static_cast<std::ptrdiff_t>(token), part.ids.end(),
                                         static_cast<std::int64_t>(expert)) != part.ids.end();
            if (of_expert[expert] < call.tokens_max && of_rank[rank] < call.rows_max(rank)) {
                ++of_expert[expert];
                ++of_rank[rank];
                id = static_cast<std::int64_t>(expert);
                coverage["duplicate_ids"] += again;
            }
        }
        part.ids.push_back(id);
        part.weights.push_back(static_cast<float>(random.below(1000)) / 997.0f);
    }
    part.x.resize(part.tokens * call.hidden * 2);
    for (std::size_t at = 0; at < part.x.size(); at += 2) {
        const std::uint16_t bits = small_bf16(random.next());
        std::memcpy(part.x.data() + at, &bits, sizeof bits);
    }
    return part;
}

// Hooks late, early, and now and then the second one first; before a change of masks all of them.
void make_deeds(Random& random, LowLatencyScript& script, std::uint32_t rank, Coverage& coverage) {
    const auto ranks = static_cast<std::uint32_t>(script.node_of.size());
    std::vector<LowLatencyDeed>& deeds = script.deeds[rank];
    std::vector<std::size_t> open;
    const auto hook = [&](std::size_t step) {
        deeds.push_back({Deed::hook, step, 0});
        open.erase(std::find(open.begin(), open.end(), step));
    };
    for (std::size_t step = 0; step < script.steps.size(); ++step) {
        for (std::uint32_t other = 0; other < ranks; ++other) {
            const bool was = step > 0 && !script.together(step - 1, rank, other);
            const bool is = !script.together(step, rank, other);
            if (was == is) continue;
            while (!open.empty()) hook(open.front());
            deeds.push_back({is ? Deed::mask : Deed::unmask, step, other});
        }
        const LowLatencyStep& now = script.steps[step];
        if (now.kind == Kind::combine && std::find(open.begin(), open.end(), now.dispatch) != open.end()) {
            hook(now.dispatch);
        }
        if (step >= 2 && std::find(open.begin(), open.end(), step - 2) != open.end()) {
            if (open.size() == 2 && random.chance(0.2)) {
                ++coverage["second_hook_first"];
                hook(step - 1);
            }
            hook(step - 2);
        }
        deeds.push_back({Deed::send, step, 0});
        open.push_back(step);
        coverage["two_live"] += open.size() == 2;
        if (now.disagree || random.chance(0.4)) hook(step);
    }
    while (!open.empty()) hook(open.front());
}

void make_masks(Random& random, LowLatencyScript& script, Coverage& coverage) {
    const auto ranks = static_cast<std::uint32_t>(script.node_of.size());
    script.apart.assign(script.steps.size(), std::vector<std::uint8_t>(ranks * ranks, 0));
    if (ranks < 2 || !random.chance(0.3)) return;
    const auto a = static_cast<std::uint32_t>(random.below(ranks));
    const auto b = static_cast<std::uint32_t>((a + 1 + random.below(ranks - 1)) % ranks);
    const std::uint64_t from = random.below(script.steps.size());
    const std::uint64_t to = random.between(from, script.steps.size());
    for (std::uint64_t step = from; step < to; ++step) {
        script.apart[step][a * ranks + b] = script.apart[step][b * ranks + a] = 1;
    }
    coverage["masked"] += to > from;
    coverage["unmasked"] += to > from && to < script.steps.size();
}

}  // namespace

LowLatencyScript make_low_latency_script(Random& random, Coverage& coverage) {
    LowLatencyScript script;
    const auto ranks = static_cast<std::uint32_t>(random.between(1, 8));
    const auto nodes = static_cast<std::uint32_t>(random.between(1, std::min(ranks, 4u)));
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        script.node_of.push_back(rank < nodes ? rank : static_cast<std::uint32_t>(random.below(nodes)));
    }
    ++coverage["ranks_" + std::to_string(ranks)];
    ++coverage["nodes_" + std::to_string(nodes)];
    const exchange::NodeTable table(script.node_of);
    const LowLatencyCall shape = make_call(random, ranks, coverage);
    std::vector<std::size_t> waiting;  // dispatches without their combine
    const std::uint64_t count = random.between(1, 10);
    for (std::size_t at = 0; at < count; ++at) {
        LowLatencyStep step;
        step.index_bytes = random.chance(0.5) ? 8 : 4;
        const bool combine = !waiting.empty() && (waiting.size() == 2 || random.chance(0.5));
        if (combine) {
            const std::size_t which = random.below(waiting.size());
            step.kind = Kind::combine;
            step.dispatch = waiting[which];
            step.call = script.steps[step.dispatch].call;
            waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(which));
        } else {
            step.call = random.chance(0.7) ? shape : make_call(random, ranks, coverage);
            for (std::uint32_t rank = 0; rank < ranks; ++rank) {
                step.ranks.push_back(make_part(random, step.call, coverage));
            }
            step.disagree = ranks > 1 && random.chance(0.03);
            step.disagreeing = static_cast<std::uint32_t>(random.below(ranks));
            coverage["disagreements"] += step.disagree;
            if (!step.disagree) waiting.push_back(at);
        }
        script.data_bytes = std::max(script.data_bytes, exchange::low_latency_bytes(step.call, table));
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
            script.local_experts_max =
                std::max(script.local_experts_max, static_cast<std::uint32_t>(step.call.owned(rank)));
        }
        coverage[combine ? "combines" : "dispatches"] += 1;
        script.steps.push_back(std::move(step));
    }
    script.data_bytes = (script.data_bytes + 127) / 128 * 128;
    if (random.chance(0.5)) script.data_bytes *= 4;
    make_masks(random, script, coverage);
    script.deeds.resize(ranks);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) make_deeds(random, script, rank, coverage);
    return script;
}

// ---- oracle

std::vector<std::vector<LowLatencyRow>> expected_rows(const LowLatencyScript& script, std::size_t step,
                                                      std::uint32_t rank) {
    const LowLatencyStep& dispatch = script.steps[step];
    const std::uint64_t first = dispatch.call.expert_first[rank];
    std::vector<std::vector<LowLatencyRow>> rows(dispatch.call.owned(rank));
    for (std::uint64_t expert = 0; expert < rows.size(); ++expert) {
        for (std::uint32_t source = 0; source < script.node_of.size(); ++source) {
            if (!script.together(step, rank, source)) continue;
            const std::vector<std::int64_t>& ids = dispatch.ranks[source].ids;
            for (std::uint64_t slot = 0; slot < ids.size(); ++slot) {
                if (ids[slot] == static_cast<std::int64_t>(first + expert)) {
                    rows[expert].push_back({source, slot / dispatch.call.topk, slot});
                }
            }
        }
    }
    return rows;
}

std::uint16_t expert_value(std::size_t step, std::uint32_t rank, std::uint64_t expert, std::uint64_t row,
                           std::uint64_t column) {
    return small_bf16(mix64(((step * 31 + rank) * 1009 + expert) * 100'003 + row * 1013 + column));
}

Bytes expected_sums(const LowLatencyScript& script, std::size_t step, std::uint32_t home) {
    const LowLatencyStep& combine = script.steps[step];
    const LowLatencyStep& dispatch = script.steps[combine.dispatch];
    const LowLatencyPart& part = dispatch.ranks[home];
    const std::uint64_t hidden = combine.call.hidden;
    std::vector<std::vector<std::uint16_t>> of_slot(part.ids.size());  // the row that comes back for each
    for (std::uint32_t rank = 0; rank < script.node_of.size(); ++rank) {
        if (!script.together(step, home, rank) || !script.together(combine.dispatch, home, rank)) continue;
        const auto rows = expected_rows(script, combine.dispatch, rank);
        for (std::uint64_t expert = 0; expert < rows.size(); ++expert) {
            for (std::uint64_t row = 0; row < rows[expert].size(); ++row) {
                if (rows[expert][row].source != home) continue;
                std::vector<std::uint16_t>& values = of_slot[rows[expert][row].slot];
                for (std::uint64_t c = 0; c < hidden; ++c) values.push_back(expert_value(step, rank, expert, row, c));
            }
        }
    }
    Bytes out(part.tokens * hidden * 2);
    for (std::uint64_t token = 0; token < part.tokens; ++token) {
        for (std::uint64_t column = 0; column < hidden; ++column) {
            float acc = 0.0f;
            for (std::uint64_t k = 0; k < combine.call.topk; ++k) {
                const std::uint64_t slot = token * combine.call.topk + k;
                if (of_slot[slot].empty()) continue;
                const float product = part.weights[slot] * rows::widen_bf16(of_slot[slot][column]);
                acc += product;
            }
            const std::uint16_t bits = rows::round_bf16(acc);
            std::memcpy(out.data() + (token * hidden + column) * 2, &bits, sizeof bits);
        }
    }
    return out;
}

}  // namespace expertwire::simulation
