// What the ranks of one simulated cluster are made to do: the shape, and a list of calls with every rank's inputs, all
// from one seed. And, from nothing but these inputs, what each rank must get: the independent oracle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "exchange/exchange.hpp"
#include "provider/simulated.hpp"

namespace expertwire::simulation {

using Bytes = std::vector<std::byte>;
using Coverage = std::map<std::string, std::uint64_t>;

enum class Outcome : std::uint8_t { success, mismatch, capacity };

// One rank's part in one call. Which fields are used depends on the call's kind.
struct RankCall {
    std::uint64_t tokens = 0;
    std::uint64_t row_bytes = 0;  // the call's, unless this rank is made to disagree
    bool has_weights = false;     // likewise
    Bytes x;
    Bytes scales;  // dispatch [tokens][scale_bytes]
    std::vector<std::uint8_t> in_rank;
    std::vector<std::uint8_t> kept;  // of in_rank, what lies below rows_max at its destination
    std::uint64_t rows_max = 0;      // the call's, unless this rank is made to disagree
    Bytes topk_idx;
    std::vector<float> weights;  // dispatch [tokens][topk], combine [rows][topk]
    std::uint32_t biases = 0;    // 0, 1, 2
    Bytes bias0, bias1;
    bool x_in_place = false;
    bool weights_in_place = false;
    std::uint64_t x_offset = 0;  // in place: where in the data region
    std::uint64_t weights_offset = 0;
    std::uint64_t offer_offset = 0;
    std::uint64_t offer_capacity = 0;
};

struct Call {
    exchange::Kind kind = exchange::Kind::dispatch;
    std::uint64_t row_bytes = 0;
    std::uint32_t topk = 0;
    std::uint32_t index_bytes = 8;
    bool has_weights = false;
    std::uint32_t scale_bytes = 0;
    std::uint64_t rows_max = 0;  // W; 0: none
    std::uint64_t num_experts = 0;
    std::vector<std::uint64_t> expert_first;
    std::int32_t routing = -1;  // the dispatch whose handle it takes; -1: it makes its own
    Outcome outcome = Outcome::success;
    std::vector<RankCall> ranks;

    exchange::RowShape row() const { return {row_bytes, scale_bytes, topk, index_bytes, has_weights}; }
};

struct Script {
    std::vector<std::uint32_t> node_of;
    std::uint32_t local_experts_max = 0;
    std::uint32_t ring_slots = 1;
    std::uint64_t slot_bytes = 64;
    std::uint64_t data_bytes = 0;
    std::uint64_t slack_bytes = 0;  // behind the data region, so that a mutant's stray row hits nothing else
    std::vector<Call> calls;
};

Script make_script(Random& random, Coverage& coverage);

// One dispatch, and a combine behind it, of a shape that somebody asks for.
struct ShapeOptions {
    std::uint32_t ranks = 8;
    std::uint32_t ranks_per_node = 4;
    std::uint64_t tokens = 128;    // of each rank
    std::uint64_t row_bytes = 64;  // in memory
    std::uint64_t experts = 288;
    std::uint32_t topk = 8;
    std::uint32_t chunk_rows = 16;
    std::uint32_t ring_slots = 8;
    bool combine = false;  // chunks are then sized for its rows
};
Script make_shape(const ShapeOptions& shape, Random& random, Coverage& coverage);

// The oracle: rows [source][destination] of a routing, who sends what where, byte by byte.
std::vector<std::uint64_t> routing_matrix(const Script& script, const Call& dispatch);  // of the rows kept
std::vector<std::uint64_t> rows_sent_to(const Script& script, const Call& dispatch);    // [rank], kept or not
const Call& routing_of(const Script& script, const Call& call);

struct Received {
    std::uint64_t rows = 0;
    Bytes x, src_idx, indices, weights, scales;
    std::vector<std::uint64_t> expert_counts;
};
Received expected_dispatch(const Script& script, const Call& call, std::uint32_t rank);

struct Combined {
    Bytes out;
    std::vector<float> weights;
};
Combined expected_combine(const Script& script, const Call& call, std::uint32_t rank);

}  // namespace expertwire::simulation
