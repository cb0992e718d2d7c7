// What is done to rows of bytes and of bf16: copies, ordered sums, counting. Pure functions without threads or state,
// the widest vectors that this machine has, the same bits on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace expertwire::rows {

// `streaming` stores go past the caches: right for large rows that another core reads later. They are ordered before a
// release store only by fence().
enum class Store : std::uint8_t { cached, streaming };

void copy(std::byte* to, const std::byte* from, std::size_t bytes, Store store);
void fence();

// Round to nearest even; every NaN becomes the one quiet NaN 0x7FC0, since which NaN survives a sum depends on how the
// compiler orders operands.
std::uint16_t round_bf16(float value);
float widen_bf16(std::uint16_t value);

// One output row of a combine (DESIGN "Order of sums"): acc = 0 + bias0 + bias1; for each group: p = its rows summed in
// fp32 in the order given; acc += p. Result: bf16(acc). A group is a node; a null bias is left out.
struct Sum {
    const std::byte* const* rows = nullptr;  // all groups' rows, one after another
    const std::uint32_t* ends = nullptr;     // [groups]: where each group ends in `rows`, ascending
    std::uint32_t groups = 0;
    const std::byte* bias0 = nullptr;
    const std::byte* bias1 = nullptr;
};
void reduce(std::byte* out, const Sum& sum, std::size_t columns, Store store);

// The same for fp32 values (top-k weights), which are never rounded; `out` is f32[columns].
void reduce_f32(float* out, const Sum& sum, std::size_t columns);

// The variants that this machine can run, for tests: each must give the same bits.
enum class Isa : std::uint8_t { baseline, avx2, avx512 };
bool has(Isa isa);
Isa best_isa();
void reduce_with(Isa isa, std::byte* out, const Sum& sum, std::size_t columns);
void round_row_with(Isa isa, std::byte* out, const float* in, std::size_t columns);

// get_dispatch_layout: who gets what. A negative id is "no expert" only if it is -1; other ids outside [0, experts) are
// an error. A token counts once per rank and per node whatever its duplicates, and once per slot for each expert.
struct LayoutCounts {
    std::int32_t* per_rank = nullptr;    // i32[ranks]
    std::int32_t* per_node = nullptr;    // i32[nodes], may be null
    std::int32_t* per_expert = nullptr;  // i32[experts]
    std::uint8_t* in_rank = nullptr;     // bool[tokens][ranks]
};
struct LayoutError {
    bool failed = false;
    std::uint64_t token = 0;
    std::uint32_t slot = 0;
    std::int64_t value = 0;
};
// `index_bytes` is 4 or 8; `expert_first` has ranks + 1 entries (rank r owns [first[r], first[r+1])).
LayoutError count_layout(const void* topk_idx, std::uint32_t index_bytes, std::uint64_t tokens, std::uint32_t topk,
                         const std::uint64_t* expert_first, std::uint32_t ranks, const std::uint32_t* node_of,
                         std::uint32_t nodes, const LayoutCounts& out);

}  // namespace expertwire::rows
