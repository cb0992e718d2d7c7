// One combine: rows go back to their homes, summed on the way (DESIGN "Order of sums"). The home adds the rows of its
// own node where they lie; in every other node the home's entry rank sums that node's rows and sends one row per token.
#pragma once

#include <cstdint>
#include <vector>

#include "exchange/exchange.hpp"
#include "exchange/ring.hpp"
#include "rows/rows.hpp"

namespace expertwire::exchange {

class Combine final : public Operation {
  public:
    Combine(Exchange& exchange, const CombineRequest& request);
    std::uint64_t chunks_sent() const override;

  private:
    // The input of a rank of my node, by local index, as I read it.
    struct Input {
        std::uint32_t rank = 0;
        const std::byte* rows = nullptr;
        const std::byte* weights = nullptr;
        bool complete = false;        // in place, or mine: nothing to wait for
        std::uint64_t available = 0;  // rows known to be readable
        std::uint64_t next = 0;       // row of my own next token there
        std::uint64_t window = kUnbounded;
        std::uint64_t first = 0;  // row of my own first token there
        std::uint64_t told = 0;   // rows of my own that it knows to be read
    };
    // As the entry of a home in another node: sums of my node's rows for it.
    struct Outgoing {
        SendRing ring;
        std::uint32_t home = 0;
        std::uint64_t token = 0;  // next, counted over the home's tokens that came to this node
        std::uint64_t tokens = 0;
        std::uint32_t filled = 0;         // rows in the open chunk
        std::byte* slot = nullptr;        // of the open chunk
        std::vector<std::uint64_t> next;  // [local index]: its row of that token
        std::vector<std::uint64_t> told;  // rows of the home that it knows to be read
    };
    // Sums of another node for my tokens.
    struct Incoming {
        ReceiveRing ring;
        std::uint32_t node = 0;
        std::uint64_t rows_left = 0;
        std::uint32_t rows_read = 0;       // over all chunks
        const std::byte* chunk = nullptr;  // at the front, checked; null: none yet
        std::uint32_t row = 0;             // next in it
        std::uint32_t rows = 0;            // in it
    };
    // Rows of my input that others read, and where they have to be put for that.
    struct Stretch {
        std::uint32_t home = 0;
        std::uint64_t begin = 0;
        std::uint64_t end = 0;
    };
    enum class Taken : std::uint8_t { no, yes, blocked };

    Need needed(std::uint32_t rank) const override { return {routing_.received(rank), notify(rank).offer_needed}; }
    void begin() override;
    std::uint64_t move(std::uint64_t budget) override;
    bool rows_done() const override;
    bool drained() override;
    void describe(PeerProgress& row) const override;

    void place_input(NotifyHeader& header);
    void find_stretches();
    void fit_window(NotifyHeader& header);
    std::uint64_t freed();
    const std::byte* row_at(const Input& input, std::uint64_t row) const {
        return input.rows + slot_of(row, input.window) * request_.row_bytes;
    }
    const std::byte* weights_at(const Input& input, std::uint64_t row) const {
        return request_.topk > 0 ? input.weights + slot_of(row, input.window) * request_.topk * sizeof(float) : nullptr;
    }
    void tell_read();
    void tell_read(Outgoing& out);
    void open_inputs();
    void open_rings();
    std::uint64_t copy_in(std::uint64_t budget);
    std::uint64_t reduce_for(Outgoing& out, std::uint64_t budget);
    std::uint64_t send_whole(Outgoing& out, std::uint64_t budget);
    std::uint64_t reduce_home(std::uint64_t budget);
    Taken take_near(const std::uint8_t* present);
    Taken take_far(Incoming& in, const std::uint8_t* present);
    Taken take_token(std::uint64_t token);
    void advance(std::uint64_t token);
    bool readable(Input& input, std::uint64_t row);
    bool load_chunk(Incoming& in);
    void add_row(const std::byte* row, const std::byte* weights);
    void close_chunk(Outgoing& out, std::uint64_t bytes, const Port::Piece& apart = {});
    void finish_reading();
    rows::Sum sum_of(const std::vector<const std::byte*>& rows) const;

    const CombineRequest request_;
    const Handle& routing_;
    const std::uint64_t columns_;
    const rows::Store store_;
    const ChunkShape chunk_;
    bool copies_rows_ = false;
    bool copies_weights_ = false;
    bool sends_whole_ = false;       // my node is I alone and my input is in place: nothing to sum before it leaves
    std::uint64_t rows_offset_ = 0;  // of my input in my data region
    std::uint64_t weights_offset_ = 0;
    std::vector<Stretch> stretches_;  // to be copied
    std::size_t stretch_ = 0;
    std::uint64_t window_ = kUnbounded;  // rows of my input that my extent holds at a time
    std::size_t freed_stretch_ = 0;      // those below have been read
    std::uint64_t copied_ = 0;           // rows below this are readable by my node
    std::vector<Input> inputs_;          // [local index]
    std::vector<Outgoing> outgoing_;
    std::vector<Incoming> incoming_;  // by node, ascending
    std::size_t turn_ = 0;            // which outgoing ring goes first
    std::uint64_t token_ = 0;         // my next
    bool reading_done_ = false;
    // Scratch of one sum.
    std::vector<const std::byte*> sum_rows_;
    std::vector<const std::byte*> sum_weights_;
    std::vector<std::uint32_t> sum_ends_;
};

}  // namespace expertwire::exchange
