#include "provider/simulated_plan.hpp"

#include <array>

namespace expertwire {

namespace {

// Swarm testing: each seed switches every kind of fault on or off, and draws how often those that are on strike, in
// steps of a factor of three. What is off matters as much: a fault that always strikes hides what needs a quiet run.
void draw_swarm(EnginePlan& plan, Random& random) {
    const auto on = [&](const char* name, double share) {
        const bool chosen = random.chance(share);
        if (chosen) plan.swarm.emplace_back(name);
        return chosen;
    };
    const auto weight = [&](const char* name, double share, double most) {
        if (!on(name, share)) return 0.0;
        static constexpr std::array<double, 4> steps{1, 1. / 3, 1. / 9, 1. / 27};
        return most * steps[random.below(steps.size())];
    };
    NetworkFaults& faults = plan.faults;
    faults.again = weight("again", 0.5, 0.3);  // more, and the hard deadline is what ends requests, rightly
    faults.late_delivery = weight("late_delivery", 0.5, 0.6);
    faults.late_completion = weight("late_completion", 0.5, 0.6);
    faults.early_local = weight("early_local", 0.5, 0.9);
    faults.failed_post = weight("failed_post", 0.15, 0.06);
    faults.failed_operation = weight("failed_operation", 0.25, 0.1);
    faults.lost_completion = weight("lost_completion", 0.12, 0.03);
    faults.fail_at = on("failed_kth", 0.2) ? random.between(1, 60) : 0;
    faults.duplicate = weight("duplicate", 0.5, 0.4);
    faults.wrong_generation = weight("wrong_generation", 0.5, 0.4);
    faults.null_context = weight("null_context", 0.5, 0.1);
    plan.closes_regions = on("closes_regions", 0.2);
    plan.wrong_ranges = on("wrong_ranges", 0.2);
    plan.freezes = on("freezes", 0.25);
    plan.kills = on("kills", 0.2) && plan.ranks > 2;
    plan.endpoint_errors = on("endpoint_errors", 0.1);
    plan.cancels = on("cancels", 0.5);
    plan.local_levels = on("local_levels", 0.5);
    // Not where order is trusted: a network that pulls its writes keeps none (SPEC T5).
    const bool pulls = plan.policy.ordering != OrderingClass::ordered && on("rendezvous", 0.25);
    if (pulls) plan.model.rendezvous_bytes = random.below(EngineOracle::chunk_bytes_max);
    if (on("busy_ranks", 0.3)) {
        plan.served = random.chance(0.5) ? 0.5 : 0.2;
        plan.limits.hard_timeout_ns *= 5;
    }
}

// Back-pressure from everywhere at once, and nothing that may fail: every request has to succeed, in its turn.
void squeeze(EnginePlan& plan, const EngineSimulationOptions& options, Random& random) {
    plan.ranks = options.ranks > 0 ? options.ranks : 12;
    plan.lanes = 3;
    plan.limits.peers_max = plan.ranks;
    plan.limits.queue_pairs_max = plan.ranks * plan.lanes;
    plan.limits.queue_pairs_per_peer_max = plan.lanes;
    plan.limits.outstanding_max = 4;
    plan.limits.hard_timeout_ns = 4'000'000'000;
    plan.model.transmit_queue = static_cast<std::uint32_t>(random.between(1, 2));
    plan.model.completion_queue = 1;
    NetworkFaults only;
    only.again = 0.2;
    only.late_completion = plan.faults.late_completion;
    plan.faults = only;
    plan.freezes = plan.kills = plan.endpoint_errors = plan.closes_regions = plan.wrong_ranges = plan.cancels = false;
    plan.swarm.clear();
}

// From numbers of their own: other seeds stay what they were.
void draw_bulk(EnginePlan& plan, const EngineSimulationOptions& options) {
    Random random(mix64(options.seed ^ 0x62'75'6c'6b));
    if (plan.policy.ordering != OrderingClass::delivery_gated || !random.chance(0.4)) return;
    plan.bulk_window = static_cast<std::uint32_t>(random.between(1, 6));
    plan.limits.bulk_post_bytes = random.between(2, EngineOracle::chunks_max) * EngineOracle::chunk_bytes_max;
    if (random.chance(0.5)) plan.limits.bulk_chunk_bytes = EngineOracle::chunk_bytes_max;
    if (random.chance(0.5)) plan.limits.bulk_hold_ns = 4'000;
    plan.limits.bulk_quiet_ns = 1'000;
    // Bulk is served after all others: where slots are few it may be without a turn for longer than a deadline that is
    // a hundred holds. In earnest it is a million.
    plan.limits.hard_timeout_ns *= 10;
    plan.limits.bulk_wary_ns = 8'000;
    plan.swarm.emplace_back("bulk");
}

}  // namespace

EnginePlan make_engine_plan(const EngineSimulationOptions& options, Random& random) {
    EnginePlan plan;
    const auto coin = [&] { return random.chance(0.5); };
    plan.ranks = random.chance(0.08) ? 12 : static_cast<std::uint32_t>(random.between(2, 6));
    if (options.ranks > 0) plan.ranks = options.ranks;
    plan.lanes = static_cast<std::uint32_t>(random.between(2, 3));
    plan.endpoints = coin() ? 2 : 1;
    plan.requests = static_cast<std::uint32_t>(plan.ranks > 6 ? random.between(4, 8) : random.between(10, 24));
    if (options.requests_per_rank > 0) plan.requests = options.requests_per_rank;
    static constexpr std::array<std::uint32_t, 5> caps{2, 4, 8, 16, 64};
    plan.limits.peers_max = plan.ranks;
    plan.limits.queue_pairs_max = plan.ranks * plan.lanes;
    plan.limits.queue_pairs_per_peer_max = plan.lanes;
    plan.limits.outstanding_max = caps[random.below(caps.size())];
    plan.limits.requests_max = 12;
    plan.limits.queued_max = static_cast<std::uint32_t>(random.between(8, 48));
    plan.limits.held_max = static_cast<std::uint32_t>(random.between(3, 12));
    plan.limits.regions_max = EngineOracle::regions;
    plan.limits.hard_timeout_ns = 400'000;
    if (random.chance(0.25)) {
        plan.policy.ordering = OrderingClass::ordered;
        if (coin()) plan.policy.ordered_bytes_max = EngineOracle::chunk_bytes_max / 2;
    }
    if (options.counted) {
        plan.policy.ordering = OrderingClass::counted_immediates;
        plan.model.delivery_complete = coin();
        plan.model.counted_tags = static_cast<std::uint32_t>(random.between(2, 40));
        plan.model.counting_patience = static_cast<std::uint32_t>(random.below(4));
    }
    plan.model.ordering = plan.policy.ordering;
    plan.model.transmit_queue = coin() ? 128 : static_cast<std::uint32_t>(random.between(2, 12));
    draw_swarm(plan, random);
    if (random.chance(0.3))
        plan.limits.first_generation = ~std::uint32_t{0} - static_cast<std::uint32_t>(random.below(4));
    draw_bulk(plan, options);
    if (options.squeeze) squeeze(plan, options, random);
    if (options.own_faults) {
        plan.faults = options.faults;
        plan.freezes = plan.kills = plan.endpoint_errors = plan.closes_regions = plan.wrong_ranges = false;
        plan.swarm.clear();
    }
    return plan;
}

}  // namespace expertwire
