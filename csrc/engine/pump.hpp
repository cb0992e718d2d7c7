// One turn of engine and provider: poll, deadlines, post. Used by the runtime (real time) and the simulation (virtual
// time) alike. A template, so that this room needs to know no provider.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/engine.hpp"

namespace expertwire {

struct PumpResult {
    std::uint32_t completions = 0;
    std::uint32_t posted = 0;
    std::uint32_t again = 0;
    bool moved() const { return completions + posted > 0; }
};

// Kept from turn to turn: to make these tables anew took 3 % of a sender's time at 7 KiB, where a turn has one
// completion.
struct PumpTables {
    std::array<Completion, 64> completions;
    std::array<PostCommand, 64> commands;
};

// `arrivals` is what the provider's poll() appends to. Bounded, as the next: at most `rounds` × 64.
template <class AnyProvider, class Arrivals>
void pump_polls(Engine& engine, AnyProvider& provider, Arrivals& arrivals, TimeNs now, std::uint32_t rounds,
                PumpTables& tables, PumpResult& result) {
    auto& completions = tables.completions;
    for (std::uint32_t round = 0; round < rounds; ++round) {
        const std::size_t count = provider.poll(std::span<Completion>(completions), arrivals);
        for (std::size_t i = 0; i < count; ++i) engine.on_completion(completions[i], now);
        result.completions += static_cast<std::uint32_t>(count);
        if (count < completions.size()) break;
    }
    // Who was stopped, or in a long compile, finds completions of long ago: they are taken before deadlines are judged.
    if (engine.has_caught_up(result.completions)) engine.step(now);
}

template <class AnyProvider>
void pump_posts(Engine& engine, AnyProvider& provider, TimeNs now, std::uint32_t rounds, PumpTables& tables,
                PumpResult& result, bool bulk = true) {
    auto& commands = tables.commands;
    for (std::uint32_t round = 0; round < rounds; ++round) {
        const std::size_t count = engine.take_posts(std::span<PostCommand>(commands), now, bulk);
        std::uint32_t pushed_back = 0;
        for (std::size_t i = 0; i < count; ++i) {
            if (!engine.may_post(commands[i])) continue;
            const PostResult outcome = provider.post(commands[i]);
            pushed_back += outcome.outcome == PostOutcome::again;
            result.posted += outcome.outcome == PostOutcome::posted;
            engine.on_posted(commands[i], outcome, now);
        }
        result.again += pushed_back;
        if (count < commands.size() || pushed_back > 0) break;
    }
}

template <class AnyProvider, class Arrivals>
PumpResult pump(Engine& engine, AnyProvider& provider, Arrivals& arrivals, TimeNs now, std::uint32_t rounds = 4) {
    PumpTables tables;
    PumpResult result;
    pump_polls(engine, provider, arrivals, now, rounds, tables, result);
    pump_posts(engine, provider, now, rounds, tables, result);
    return result;
}

}  // namespace expertwire
