// What the ranks of one simulated cluster are made to do in low-latency mode, all from one seed; and, from nothing but
// that, what each must get: the independent oracle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bind/simulation_exchange_script.hpp"
#include "exchange/low_latency.hpp"

namespace expertwire::simulation {

struct LowLatencyPart {
    std::uint64_t tokens = 0;
    std::vector<std::int64_t> ids;  // [tokens][topk]
    std::vector<float> weights;     // [tokens][topk]
    Bytes x;                        // bf16 [tokens][hidden]
};

struct LowLatencyStep {
    exchange::Kind kind = exchange::Kind::dispatch;
    std::size_t dispatch = 0;  // of a combine: which step
    exchange::LowLatencyCall call;
    std::uint32_t index_bytes = 8;
    std::vector<LowLatencyPart> ranks;  // of a dispatch
    bool disagree = false;              // one rank says another M: every rank must say so
    std::uint32_t disagreeing = 0;
};

enum class Deed : std::uint8_t { send, hook, mask, unmask };
struct LowLatencyDeed {
    Deed deed = Deed::send;
    std::size_t step = 0;
    std::uint32_t other = 0;
};

struct LowLatencyScript {
    std::vector<std::uint32_t> node_of;
    std::uint64_t data_bytes = 0;
    std::uint32_t local_experts_max = 0;
    std::vector<LowLatencyStep> steps;
    std::vector<std::vector<std::uint8_t>> apart;    // [step][receiver * ranks + source]: it is left out there
    std::vector<std::vector<LowLatencyDeed>> deeds;  // [rank]

    bool together(std::size_t step, std::uint32_t receiver, std::uint32_t source) const {
        return apart[step][receiver * node_of.size() + source] == 0;
    }
};

LowLatencyScript make_low_latency_script(Random& random, Coverage& coverage);

struct LowLatencyRow {
    std::uint32_t source = 0;
    std::uint64_t token = 0;
    std::uint64_t slot = 0;
};
// [local expert]: the rows that come to a rank, in order.
std::vector<std::vector<LowLatencyRow>> expected_rows(const LowLatencyScript& script, std::size_t step,
                                                      std::uint32_t rank);
// What the experts of a rank make of a row: bf16 bits of one column.
std::uint16_t expert_value(std::size_t step, std::uint32_t rank, std::uint64_t expert, std::uint64_t row,
                           std::uint64_t column);
Bytes expected_sums(const LowLatencyScript& script, std::size_t step, std::uint32_t home);

}  // namespace expertwire::simulation
