// Where everything lies in a rank's three regions: pure functions of the shape, the same arithmetic on every rank, so
// that a writer knows the target's offsets without being told (ep/plan.py mirrors them). All offsets are 64-bit bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace expertwire::exchange {

constexpr std::uint64_t kAlignment = 64;  // of every array that starts inside a region: one cache line

constexpr std::uint64_t align_up(std::uint64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Which rank is where (SPEC E9): a table, never a division. Nodes are numbered 0…RR-1 without a gap; the ranks of a
// node need not be neighbours.
class NodeTable {
  public:
    NodeTable() = default;
    explicit NodeTable(std::vector<std::uint32_t> node_of);  // see shape_error() for what is accepted

    std::uint32_t ranks() const { return static_cast<std::uint32_t>(node_of_.size()); }
    std::uint32_t nodes() const { return static_cast<std::uint32_t>(members_.size()); }
    std::uint32_t node_of(std::uint32_t rank) const { return node_of_[rank]; }
    const std::vector<std::uint32_t>& members(std::uint32_t node) const { return members_[node]; }
    std::uint32_t size(std::uint32_t node) const { return static_cast<std::uint32_t>(members_[node].size()); }
    std::uint32_t local_index(std::uint32_t rank) const { return local_index_[rank]; }
    std::uint32_t mask_words(std::uint32_t node) const { return (size(node) + 63) / 64; }

    // The one rank of `node` that a rank of another node talks to: rows of `rank` enter there in a dispatch, and leave
    // from there, summed, in a combine.
    std::uint32_t entry(std::uint32_t rank, std::uint32_t node) const {
        return members_[node][local_index_[rank] % size(node)];
    }

  private:
    std::vector<std::uint32_t> node_of_;
    std::vector<std::vector<std::uint32_t>> members_;  // ascending
    std::vector<std::uint32_t> local_index_;
};

struct Shape {
    std::uint32_t rank = 0;
    NodeTable nodes;
    std::uint32_t local_experts_max = 0;  // the largest number of experts that any rank owns in any call
    std::uint32_t ring_slots = 4;         // chunks that may be under way per ring
    std::uint64_t slot_bytes = 1 << 20;   // largest chunk, its header and row numbers included
};

// Empty when the shape can be used, else what is wrong with it: argument, value and limit.
std::string node_table_error(const std::vector<std::uint32_t>& node_of);
std::string shape_error(const Shape& shape);
std::string expert_first_error(const std::vector<std::uint64_t>& expert_first, std::uint64_t ranks,
                               std::uint64_t num_experts);

// Rows travel in rings. There is one ring for each pair (rank s, node b that s is not in); its outer half lies at s,
// its inner half at entry(s, b). A dispatch moves chunks from the outer half to the inner, a combine from the inner to
// the outer; no operation begins before every rank has ended the one before, so both directions share the memory.
class Layout {
  public:
    Layout() = default;
    explicit Layout(const Shape& shape);

    std::uint64_t control_bytes() const { return control_bytes_; }
    std::uint64_t staging_bytes(std::uint32_t rank) const;

    // Words in rank d's control region (offsets are the same on every rank). Each has exactly one writer.
    std::uint64_t notified(std::uint32_t parity, std::uint32_t source) const;
    // Arrival has a word per slot, each slot's own chunk number: chunks may become visible in any order.
    std::uint64_t arrived_inner(
        std::uint32_t source) const;  // at entry(source, ·), slot 0: chunks of a dispatch put here
    std::uint64_t arrived_outer(std::uint32_t node) const;  // at home, slot 0: chunks of a combine put by its entry
    std::uint64_t credit_outer(std::uint32_t node) const;   // at source: chunks of a dispatch that the entry consumed
    std::uint64_t credit_inner(std::uint32_t home) const;   // at entry(home, ·): chunks of a combine consumed
    std::uint64_t done(std::uint32_t source) const;         // rows of `source` that are in their final place here
    std::uint64_t ready(std::uint32_t peer) const;          // rows of the peer's combine input that may be read
    std::uint64_t read_done(std::uint32_t peer) const;      // 1: the peer will not read my combine input again
    std::uint64_t taken(std::uint32_t peer) const;          // rows that the peer has taken out of its window
    std::uint64_t consumed(std::uint32_t home) const;       // rows of `home` in my combine input that were read

    // Notify slots: what `source` has to say, by parity of the epoch; and what goes out to another node's rank `to`.
    std::uint64_t notify_slot_bytes() const { return notify_bytes_; }
    std::uint64_t notify_in(std::uint32_t parity, std::uint32_t source) const;
    std::uint64_t notify_out(std::uint32_t to) const;

    // Ring slots in a rank's staging region.
    std::uint64_t outer_slot(std::uint32_t rank, std::uint32_t node, std::uint64_t chunk) const;
    std::uint64_t inner_slot(std::uint32_t entry, std::uint32_t source, std::uint64_t chunk) const;

    const Shape& shape() const { return shape_; }

  private:
    std::uint64_t word(std::uint64_t index) const { return index * sizeof(std::uint64_t); }

    Shape shape_;
    std::uint64_t notify_bytes_ = 0;
    std::uint64_t notify_in_ = 0;
    std::uint64_t notify_out_ = 0;
    std::uint64_t control_bytes_ = 0;
    std::vector<std::uint32_t> inner_index_;  // [source * nodes + node]: which inner ring of entry(source, node) it is
    std::vector<std::uint32_t> inner_count_;  // [rank]
};

// What one row of an operation is made of, beside what finds its way.
struct RowShape {
    std::uint64_t bytes = 0;        // of its elements
    std::uint32_t scale_bytes = 0;  // of its scales; 0: it has none
    std::uint32_t topk = 0;
    std::uint32_t index_bytes = 8;  // of a top-k index
    bool has_weights = false;
};

// Types of elements, for ranks to compare. Rows are moved as bytes; only a combine, which is bf16, looks into them.
enum class Element : std::uint16_t { none = 0, bfloat16, float8_e4m3fn, float8_e4m3fnuz, float32, int32 };

// What a rank says to every rank at the start of every operation. Counts follow: rows per rank u32[R], distinct rows
// per node u32[RR], rows per local expert of the receiver u32[local_experts_max].
struct NotifyHeader {
    std::uint32_t magic = 0;
    std::uint32_t operation = 0;  // Kind
    std::uint64_t epoch = 0;
    std::uint64_t handle_epoch = 0;  // 0: no handle
    std::uint64_t row_bytes = 0;
    std::uint32_t topk = 0;
    std::uint32_t index_bytes = 0;
    Element element = Element::bfloat16;
    Element scale_element = Element::none;
    std::uint32_t scale_bytes = 0;  // of a row
    std::uint64_t num_experts = 0;
    std::uint64_t rows_max = 0;  // W of num_worst_tokens; 0 without
    std::uint64_t tokens = 0;
    std::uint32_t has_weights = 0;
    std::uint32_t ring_slots = 0;
    std::uint64_t slot_bytes = 0;
    std::uint64_t offer_offset = 0;    // bytes from the start of the sender's data region
    std::uint64_t offer_capacity = 0;  // bytes
    std::uint64_t offer_needed = 0;    // combine: bytes of the offer that copies of the input take; 0: read in place
    std::uint64_t window_rows = 0;     // combine: of the input, that the offer holds at a time; 0: all of them
    std::uint64_t rows_offset = 0;     // combine: where the input lies in the data region, or will when it is copied
    std::uint64_t weights_offset = 0;
};

// One chunk in a ring slot: header, then arrays of `capacity` entries each, then the rows. Offsets depend only on the
// agreed shape of the operation, so that they are computed once.
struct ChunkHeader {
    std::uint64_t epoch = 0;
    std::uint32_t first_row = 0;  // counted over all rows of this ring in this operation
    std::uint32_t rows = 0;
    std::uint32_t ring_rows = 0;  // of the whole ring: fewer than announced where a destination overflows
    std::uint32_t reserved = 0;
};

struct ChunkShape {
    std::uint32_t capacity = 0;  // rows; 0: not even one row fits
    std::uint64_t tokens = 0;    // u32[capacity], dispatch: the source's token number
    std::uint64_t masks = 0;     // u64[capacity][mask_words], dispatch: ranks of the node, by local index
    std::uint64_t indices = 0;   // [capacity][topk], dispatch: global expert ids
    std::uint64_t weights = 0;   // f32[capacity][topk]
    std::uint64_t scales = 0;    // [capacity][scale_bytes], dispatch
    std::uint64_t rows = 0;      // [capacity][row_bytes]

    std::uint64_t bytes(std::uint32_t count, std::uint64_t row_bytes) const { return rows + count * row_bytes; }
};

ChunkShape dispatch_chunk(std::uint64_t slot_bytes, const RowShape& row, std::uint32_t mask_words);
ChunkShape combine_chunk(std::uint64_t slot_bytes,
                         const RowShape& row);  // row: bytes, top-k and whether it has weights

constexpr std::uint64_t chunks_for(std::uint64_t rows, std::uint32_t capacity) {
    return (rows + capacity - 1) / capacity;
}

// What a rank receives, inside the extent that it offered.
struct Extent {
    std::uint64_t rows = 0;     // always 0: rows come first
    std::uint64_t src_idx = 0;  // i32[N]
    std::uint64_t indices = 0;  // [N][topk]
    std::uint64_t weights = 0;  // f32[N][topk]
    std::uint64_t scales = 0;   // [N][scale_bytes]
    std::uint64_t bytes = 0;    // all of it
};

Extent dispatch_extent(std::uint64_t rows, const RowShape& row);
Extent combine_extent(std::uint64_t rows, const RowShape& row);  // row: as for combine_chunk

// The most rows whose extent has at most `capacity` bytes (DESIGN "Buffers": what does not fit goes in rounds).
std::uint64_t dispatch_window(std::uint64_t capacity, const RowShape& row);
std::uint64_t combine_window(std::uint64_t capacity, const RowShape& row);

// Where a row lies in a window that rows pass through in turn; kUnbounded: no window, all rows have their place.
constexpr std::uint64_t kUnbounded = ~std::uint64_t{0};
constexpr std::uint64_t slot_of(std::uint64_t row, std::uint64_t window) {
    return row < window ? row : row % window;
}

}  // namespace expertwire::exchange
