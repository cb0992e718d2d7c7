// The two kinds of low-latency calls.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "exchange/low_latency.hpp"

namespace expertwire::exchange {

// Reads topk_idx: the handle's ids, places and sent, and the slots (token * topk + k) in the order in which they
// travel: by expert, then token. Empty, or what is wrong with it.
std::string plan_dispatch(const LowLatencyDispatchRequest& request, LowLatencyHandle& handle,
                          std::vector<std::uint32_t>& order);
// The row that comes back for a slot: which of those that went to that rank.
constexpr std::uint32_t kNobody = ~std::uint32_t{0};
struct RowPlace {
    std::uint32_t rank = kNobody;
    std::uint32_t row = 0;
};
std::string plan_combine(const LowLatencyCombineRequest& request, std::vector<RowPlace>& places);

class LowLatencyDispatch final : public LowLatencyOperation {
  public:
    // `refused`: why the call does not fit, or empty.
    LowLatencyDispatch(LowLatency& exchange, const LowLatencyDispatchRequest& request,
                       std::shared_ptr<LowLatencyHandle> handle, std::vector<std::uint32_t> order, std::string refused);

  private:
    void open_target(Target& target) override;
    std::uint64_t send_rows(Target& target, std::uint64_t budget) override;
    void write_notify(std::byte* at, std::uint32_t to, std::uint64_t rows) const override;
    std::uint64_t notify_bytes(std::uint32_t to) const override;
    void begin_packing() override;
    std::uint64_t pack(std::uint64_t budget) override;
    void end_packing() override;
    std::int64_t* wait_ns() const override { return request_.wait_ns; }

    void quantise();
    struct Entry {
        std::uint32_t slot = 0;  // token * topk + k at the source
        std::uint32_t unit = 0;
    };
    struct Plan {
        std::vector<Entry> entries;         // by expert, then token
        std::vector<std::uint32_t> tokens;  // of the units
    };

    std::uint64_t unit_bytes() const;
    void place(std::byte* unit, std::uint32_t token) const;
    Entry entry(std::uint32_t source, std::uint64_t row) const;
    std::uint32_t count_of(std::uint32_t source, std::uint64_t expert) const;
    bool take_counts(std::uint32_t source);
    std::uint64_t pack_rows(std::uint64_t expert, std::uint32_t source);

    const LowLatencyDispatchRequest request_;
    const std::shared_ptr<LowLatencyHandle> handle_;
    const std::vector<std::uint32_t> order_;    // slots, by expert
    std::vector<std::uint64_t> expert_begin_;   // [experts + 1]: where an expert's slots begin
    std::vector<Plan> plans_;                   // [ranks]: what goes there
    std::vector<std::uint32_t> unit_of_token_;  // scratch of one target
    std::vector<std::byte> rows_;               // [tokens][row bytes], quantised
    std::vector<std::uint32_t> scales_;         // [tokens][scale words]
    LowLatencyBlocks blocks_;                   // of mine
    std::vector<std::uint64_t> taken_;          // [local experts][ranks]: rows of a source before the expert's
    std::uint64_t next_ = 0;                    // local expert * ranks + source to be packed
};

class LowLatencyCombine final : public LowLatencyOperation {
  public:
    LowLatencyCombine(LowLatency& exchange, const LowLatencyCombineRequest& request, std::vector<RowPlace> places);

  private:
    void open_target(Target& target) override;
    std::uint64_t send_rows(Target& target, std::uint64_t budget) override;
    void write_notify(std::byte* at, std::uint32_t to, std::uint64_t rows) const override;
    std::uint64_t notify_bytes(std::uint32_t) const override { return sizeof(LowLatencyNotify); }
    void begin_packing() override;
    std::uint64_t pack(std::uint64_t budget) override;
    std::int64_t* wait_ns() const override { return request_.wait_ns; }
    std::uint64_t handle_epoch() const override { return request_.handle->epoch; }

    const std::byte* row_of(const Target& target, std::uint64_t row);
    std::uint64_t send_near(Target& target, std::uint64_t budget);
    std::uint64_t send_staged(Target& target, std::uint64_t budget);
    std::uint64_t send_direct(Target& target);
    Port::Piece piece(const Target& target, std::uint64_t from, std::uint64_t row, std::uint64_t rows) const;

    bool gathering_pays(std::uint64_t behind) const;

    const LowLatencyCombineRequest request_;
    const std::vector<RowPlace> places_;  // [tokens][topk]
    const std::uint64_t row_bytes_;
    bool gathers_ = false;  // rows for other nodes are copied together first
    LowLatencyBlocks blocks_;
    std::vector<std::uint8_t> usable_;        // [ranks]: all rows that went there have come back
    std::vector<const std::byte*> pointers_;  // scratch of one token
    std::vector<float> weights_;              // [tokens][topk], as they were at the call
    std::vector<float> chosen_;               // scratch of one token
    std::vector<std::uint32_t> expert_of_;    // [ranks]: which expert's rows a target's next row is among …
    std::vector<std::uint64_t> before_;       // … and how many rows of the experts before it there are
    std::uint64_t token_ = 0;
};

}  // namespace expertwire::exchange
