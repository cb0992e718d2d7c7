// One dispatch: rows of x to the ranks that need them. Within the node straight to their final place, to each other
// node once, into the ring of its entry rank, which forwards them to their final places there.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "exchange/exchange.hpp"
#include "exchange/ring.hpp"
#include "rows/rows.hpp"

namespace expertwire::exchange {

inline std::int64_t load_index(const std::byte* ids, std::uint32_t index_bytes, std::uint64_t at) {
    if (index_bytes == 4) {
        std::int32_t narrow;
        std::memcpy(&narrow, ids + at * sizeof narrow, sizeof narrow);
        return narrow;
    }
    std::int64_t wide;
    std::memcpy(&wide, ids + at * sizeof wide, sizeof wide);
    return wide;
}

class Dispatch final : public Operation {
  public:
    // `made`: a handle with this rank's own counts, completed here; null where the request repeats one. Made by
    // Exchange.
    Dispatch(Exchange& exchange, const DispatchRequest& request, std::shared_ptr<Handle> made,
             const std::vector<std::int32_t>& per_expert);

    // Once done (chunks_sent: at any time).
    std::shared_ptr<const Handle> handle() const { return made_ ? made_ : handle_; }
    std::uint64_t received() const { return routing_->received(exchange_.rank()); }
    // Ranks that were sent more rows than num_worst_tokens, the same list on every rank: their rows from there on were
    // not sent, and the handle's counts are those of the rows kept.
    struct Overflow {
        std::uint32_t rank = 0;
        std::uint64_t total = 0;
    };
    const std::vector<Overflow>& overflows() const { return overflows_; }
    std::uint64_t rows_max() const { return routing_->rows_max; }
    Extent extent() const;  // inside of results()
    const std::byte* results() const {
        return spill_ != nullptr ? spill_ : exchange_.mine().data + request_.offer_offset;
    }
    bool spilled() const { return spill_ != nullptr; }  // they lie in memory that the request allocated
    std::uint64_t chunks_sent() const override;
    std::vector<std::uint64_t> expert_counts() const;  // rows per local expert of mine; empty with a repeated handle

  private:
    // Where rows land at a rank of my node, by local index.
    struct Target {
        std::uint32_t rank = 0;
        std::byte* rows = nullptr;
        std::byte* src_idx = nullptr;
        std::byte* indices = nullptr;
        std::byte* weights = nullptr;
        std::byte* scales = nullptr;
        std::int64_t expert_first = 0;
        std::int64_t expert_end = 0;
        std::uint64_t next = 0;  // row number for my own next token
        std::uint64_t window = kUnbounded;
        std::uint64_t granted = kUnbounded;  // rows below have room in it, as far as I know
        std::uint64_t first = 0;             // row number of my first token
        std::uint64_t told = 0;              // rows of mine that it knows to be in its window
    };
    struct Outgoing {
        SendRing ring;
        std::uint32_t node = 0;
        ChunkShape chunk;
        std::uint64_t token = 0;      // next to look at
        std::uint64_t rows_left = 0;  // not yet packed
        std::uint32_t packed = 0;     // rows before the open chunk
        std::uint32_t filled = 0;     // rows in the open chunk
        std::byte* slot = nullptr;    // of the open chunk
        std::uint32_t rows = 0;       // of the whole ring; 0: one chunk says so
        bool direct = false;          // rows go to their final place, only what goes with them into the ring
        bool none_left = false;       // rows were announced, and none is sent: that has still to be said
    };
    struct Incoming {
        ReceiveRing ring;
        std::uint32_t source = 0;
        std::uint64_t rows_left = 0;       // before the first chunk: as announced
        std::uint32_t rows_read = 0;       // over all chunks
        std::uint32_t rows_noted = 0;      // of chunks that were checked and whose masks are in the handle
        std::uint32_t row = 0;             // next in the chunk at the front
        std::vector<std::uint64_t> next;   // [local index]: row number at that rank …
        std::vector<std::uint64_t> limit;  // … which stays below this
        std::vector<std::uint64_t> told;   // rows that a rank with a window knows to be there
    };
    // What goes with a row besides its bytes.
    struct RowMeta {
        std::uint32_t token = 0;
        const std::byte* indices = nullptr;  // [topk]
        const std::byte* weights = nullptr;  // f32[topk]
        const std::byte* scales = nullptr;   // [scale_bytes]
    };

    Need needed(std::uint32_t rank) const override;
    void begin() override;
    std::uint64_t move(std::uint64_t budget) override;
    bool rows_done() const override;
    bool drained() override;
    void describe(PeerProgress& row) const override;

    void complete_handle();
    void keep_what_fits();
    void clear_rows_from(std::uint32_t rank, std::uint32_t kept);
    std::uint32_t announced(std::uint32_t source, std::uint32_t node) const;
    std::uint64_t rows_of_extent(std::uint32_t rank) const;
    std::uint64_t window_of(std::uint32_t rank) const;
    void open_window(Target& target);
    void open_spill();
    bool granted(Target& target, std::uint64_t row);
    bool near_granted(std::uint64_t token);
    bool row_granted(const Incoming& in, const std::byte* chunk);
    void tell_near();
    void tell_forwarded(Incoming& in);
    std::uint64_t arrived_in_order();
    std::uint64_t collect(std::uint64_t budget);
    void take_rows(std::uint64_t first, std::uint64_t count);
    bool begin_ring(Incoming& in, const ChunkHeader& header);
    void open_targets();
    void open_rings();
    std::uint64_t send(std::uint64_t budget);
    std::uint64_t send_near(std::uint64_t tokens);
    std::uint64_t pack(Outgoing& out, std::uint64_t tokens);
    void pack_row(Outgoing& out, const std::uint64_t* mask);
    void close_chunk(Outgoing& out);
    std::uint64_t forward(Incoming& in, std::uint64_t budget);
    bool forward_row(Incoming& in, const std::byte* chunk);
    bool check_chunk(const Incoming& in, const ChunkHeader& header);
    void finish_source(std::uint32_t source);
    void write_meta(const Target& target, std::uint64_t row, const RowMeta& meta) const;
    void place(const Target& target, std::uint64_t row, const std::byte* from, const RowMeta& meta) const;
    bool in_node(std::uint64_t token, std::uint32_t node, std::uint64_t* mask) const;
    bool all_arrived() const;

    const DispatchRequest request_;
    const std::shared_ptr<Handle> made_;
    const Handle* routing_;
    const RowShape row_;
    const rows::Store store_;
    const bool has_weights_;
    bool direct_ = false;          // rows of other nodes for me are put straight to their final place
    bool windowed_ = false;        // somebody in my node takes rows through a window
    std::vector<Target> targets_;  // [local index]
    std::vector<Outgoing> outgoing_;
    std::vector<Incoming> incoming_;
    std::size_t turn_ = 0;          // which incoming ring goes first
    std::uint64_t near_token_ = 0;  // next of mine to go to my node
    bool near_done_ = false;
    std::vector<Overflow> overflows_;
    // My own window, if I have one: rows are taken out of it in order, into memory of my own.
    std::byte* spill_ = nullptr;
    std::uint64_t taken_ = 0;          // rows
    std::uint32_t taking_source_ = 0;  // rows of sources below have all arrived …
    std::uint64_t taking_first_ = 0;   // … and are so many
    ChunkShape chunk_in_;              // of what arrives: depends on my node's mask
    std::vector<std::uint64_t> mask_;  // scratch
};

}  // namespace expertwire::exchange
