// The low-latency exchange as a state machine without a clock, a thread or a network (DESIGN "One token, low latency"):
// the caller steps it, the simulation steps it.
//
// A call has two parts. `send` hands every row over: by load and store to ranks of this node, by one put for each other
// rank. `receive`, the hook, waits for what the others sent and packs it in the order of its sources. Calls are
// numbered over both kinds; call k goes to a rank only once that rank has consumed call k − 2, whose memory it takes.
// So at most two calls live at a time, and a third needs the first one's hook.
//
// A rank has consumed a call when it has packed what came, and its own rows have left: the next rows that come may
// reach over them. It says so when that is so, mostly at the end of the hook, else in whatever part it does next: a
// hook does not wait for its own rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "exchange/exchange.hpp"
#include "exchange/low_latency_layout.hpp"
#include "exchange/low_latency_word.hpp"

namespace expertwire::exchange {

const char* kind_name(Kind kind);
const char* low_latency_stage_name(std::uint32_t stage);

// What a dispatch leaves for its combine. Its counts are there once its hook has run.
struct LowLatencyHandle {
    std::shared_ptr<const char> owner;  // identity of the LowLatency that made it
    std::uint64_t epoch = 0;
    LowLatencyCall call;
    bool complete = false;
    std::uint64_t tokens = 0;
    std::vector<std::int64_t> ids;     // [tokens][topk]
    std::vector<std::uint32_t> place;  // [tokens][topk]: which row of those that went to the expert's rank
    std::vector<std::uint64_t> sent;   // [ranks]: rows that went there; 0 to a masked rank
    std::vector<std::uint32_t> count;  // [local experts][ranks]: rows that came
    std::vector<std::uint32_t> begin;  // [local experts][ranks]: where they begin in the expert's rows
    std::vector<std::uint64_t> came;   // [ranks]: rows that came, over all experts
};

// Null pointers are absent tensors. Outputs are written by the hook and must live until it has ended.
struct LowLatencyDispatchRequest {
    const std::byte* x = nullptr;  // bf16 [tokens][hidden]; read by `send` alone
    std::uint64_t tokens = 0;
    const std::byte* topk_idx = nullptr;  // [tokens][topk] global ids of index_bytes each, −1 none; read at once
    std::uint32_t index_bytes = 8;
    LowLatencyCall call;
    std::byte* out = nullptr;              // [local experts][ranks * M][row bytes]
    std::uint32_t* scales = nullptr;       // 32-bit words [local experts][scale words][ranks * M]
    std::int32_t* counts = nullptr;        // [local experts]
    std::int32_t* src_info = nullptr;      // [local experts][ranks * M]: token number at its source
    std::int64_t* layout_range = nullptr;  // [local experts][ranks]: begin << 32 | count
    std::int32_t* statistics = nullptr;    // [local experts], added to
    std::int64_t* wait_ns = nullptr;       // [ranks], added to
};

struct LowLatencyCombineRequest {
    const std::byte* x = nullptr;         // bf16 [local experts][ranks * M][hidden]; read by `send` alone
    bool zero_copy = false;               // x is ignored: the rows are in the combine buffer
    const std::byte* topk_idx = nullptr;  // [tokens][topk] of index_bytes each; read at once, as the weights are
    std::uint32_t index_bytes = 8;
    const float* weights = nullptr;  // [tokens][topk]
    std::uint64_t tokens = 0;
    std::uint32_t topk = 0;
    std::uint64_t hidden = 0;
    std::shared_ptr<const LowLatencyHandle> handle;
    std::byte* out = nullptr;         // bf16 [tokens][hidden]
    std::int64_t* wait_ns = nullptr;  // [ranks], added to
};

// Why a call was not begun. Nothing was sent.
struct Refusal {
    enum class Kind : std::uint8_t { none = 0, argument, state, capacity } kind = Kind::none;
    std::string text;
};

// One row per peer for the message of a wait that ran out (SPEC E8).
struct LowLatencyPeer {
    std::uint32_t rank = 0;
    bool masked = false;
    std::uint64_t arrived = 0;   // the last call whose rows came from it
    std::uint64_t consumed = 0;  // the last call that it has consumed
    bool rows_missing = false;   // its rows of this call are waited for
    std::string missing;         // what is waited for from it, empty when nothing
};

class LowLatency;

class LowLatencyOperation {
  public:
    virtual ~LowLatencyOperation() = default;
    LowLatencyOperation(const LowLatencyOperation&) = delete;
    LowLatencyOperation& operator=(const LowLatencyOperation&) = delete;

    // Moves about `budget` bytes at most and returns; never blocks. `done`: every row is handed over, and x may be
    // overwritten. The puts may still be under way.
    Step send(std::uint64_t budget);
    // After `send` is done. `done`: the outputs are there. `failed` by mismatch or capacity leaves the exchange usable,
    // for every rank fails the same way; any other failure does not.
    Step receive(std::uint64_t budget, TimeNs now);

    // From now on this call neither waits for the rank nor takes its rows. True: it did until now.
    bool leave_out(std::uint32_t rank);
    // It failed for this reason, without a word to anybody.
    void abandon(FailureReason reason, const std::string& text);

    Kind kind() const { return kind_; }
    std::uint64_t epoch() const { return epoch_; }
    const Failure& failure() const { return failure_; }
    bool sent() const { return stage_ > Stage::sending; }
    bool ended() const { return stage_ == Stage::done || stage_ == Stage::failed; }
    std::uint32_t stage() const { return static_cast<std::uint32_t>(stage_); }
    const char* stage_name() const { return low_latency_stage_name(stage()); }
    std::vector<LowLatencyPeer> progress() const;

  protected:
    // sending → sent → packing → done; failed from anywhere.
    enum class Stage : std::uint8_t { sending = 0, sent, packing, done, failed };
    struct Target {
        std::uint32_t rank = 0;
        bool near = false;
        std::byte* block = nullptr;   // near: mine there
        std::uint64_t rows = 0;       // to go there, by the experts' count
        std::uint64_t units = 0;      // what is copied for them: a dispatch's row goes once to a rank
        std::uint64_t next = 0;       // units copied
        std::uint64_t staged_at = 0;  // far: where the rows not yet put begin, bytes of my data region …
        std::uint64_t staged = 0;     // … how many were reserved, and from which one on
        std::uint64_t staged_from = 0;
        bool open = false;  // it has consumed what was there before
        bool done = false;
    };

    LowLatencyOperation(LowLatency& exchange, Kind kind, const LowLatencyCall& call);

    // What the two kinds fill in.
    virtual void open_target(Target& target) = 0;                               // sets rows and units
    virtual std::uint64_t send_rows(Target& target, std::uint64_t budget) = 0;  // bytes moved; target.done at the end
    virtual void write_notify(std::byte* at, std::uint32_t to, std::uint64_t rows) const = 0;
    virtual std::uint64_t notify_bytes(std::uint32_t to) const = 0;
    virtual void begin_packing() = 0;                      // all records agree
    virtual std::uint64_t pack(std::uint64_t budget) = 0;  // bytes moved; 0: all is packed
    virtual void end_packing() {}
    virtual std::int64_t* wait_ns() const = 0;
    virtual std::uint64_t handle_epoch() const { return 0; }

    LowLatencyNotify header(std::uint64_t rows) const;
    LowLatencyNotify notify(std::uint32_t source) const;  // of this call; valid from packing on
    bool takes(std::uint32_t rank) const { return !left_out_[rank]; }
    std::uint64_t half() const;  // of my data region, bytes from its start
    void finish_near(Target& target);
    bool finish_far(Target& target, std::span<const Port::Piece> pieces);
    void fail(FailureReason reason, std::uint32_t rank, std::string text, Status status = Status::ok);

    LowLatency& exchange_;
    const Kind kind_;
    const std::uint64_t epoch_;
    const std::uint32_t parity_;
    const LowLatencyCall call_;
    Stage stage_ = Stage::sending;
    Failure failure_;
    std::string refused_;  // capacity: no row leaves, but everybody hears of it
    std::vector<Target> targets_;
    bool opened_ = false;

  private:
    friend class LowLatency;

    bool settled();
    Step finish();
    bool everyone_arrived(TimeNs now);
    bool agree();
    Step step_sending(std::uint64_t budget);
    void flag_near(std::uint32_t rank);

    std::vector<std::uint8_t> left_out_;  // [ranks]
    std::vector<std::uint8_t> arrived_;   // [ranks]
    TimeNs waiting_since_ = 0;
    bool waiting_ = false;
};

class LowLatency {
  public:
    // `port` and its memory outlive it. Its regions are control and data; control is zeroed before the first call.
    LowLatency(const LowLatencyShape& shape, Port& port, std::uint64_t data_bytes);
    LowLatency(const LowLatency&) = delete;
    LowLatency& operator=(const LowLatency&) = delete;

    // The next call's number is `epoch` + 1. Before the first one, the same on every rank; control words must say so.
    void start_after(std::uint64_t epoch);

    // Null and `refusal` filled, or a call that `send` and `receive` bring to its end. One that was begun must be sent.
    std::shared_ptr<LowLatencyOperation> dispatch(const LowLatencyDispatchRequest& request,
                                                  std::shared_ptr<const LowLatencyHandle>& handle, Refusal& refusal);
    std::shared_ptr<LowLatencyOperation> combine(const LowLatencyCombineRequest& request, Refusal& refusal);

    // Where in my data region the rows of the next call, a combine by that handle with zero_copy, shall be written:
    // [local experts][ranks * M][hidden] bf16. `waiting` is set where bytes there are still on their way out.
    std::optional<std::uint64_t> combine_buffer(const LowLatencyHandle& handle, bool& waiting, Refusal& refusal);

    // Tells whoever does not know it yet what has been consumed. True: nothing of a call whose hook has run is on its
    // way out, and everybody who is not masked knows. `failed` and `status`: a put that failed.
    bool settle(std::uint32_t& failed, Status& status);

    // Local: from now on nothing is sent to the rank, awaited from it, or told it; calls under way leave it out too.
    // Taken back: it is told what it missed, and gets rows again once it has said that it knows what call comes next.
    void mask(std::uint32_t rank, bool masked);
    bool masked(std::uint32_t rank) const { return masked_[rank]; }
    // May a masked rank still write rows of calls that it took part in? Then blocks must stay where they are, and, once
    // they have come to rest, its process has ended, or it is taken in, for one more call of each half: others may
    // write those before this rank begins them.
    enum class LateRows : std::uint8_t { none = 0, may_come, never };  // never: its process has ended
    void set_late_rows(std::uint32_t rank, LateRows late) { late_[rank] = late; }
    // The other side: this rank was left out, so its calls under way end here …
    void abandon(const std::string& text);
    // … and, with nothing of it on its way out, it comes back behind a call that the others have all made.
    void go_on_after(std::uint64_t epoch);
    // What of my data region was on its way to the rank when it was masked: anybody may write there.
    struct GivenUp {
        std::uint64_t call = 0;
        std::uint64_t from = 0;
        std::uint64_t to = 0;
    };
    std::vector<GivenUp> given_up(std::uint32_t rank) const;
    bool quiet(std::uint32_t rank) const;  // no put of mine to it is under way
    LowLatencyWord told(std::uint32_t rank) const;
    std::uint64_t epoch() const { return epoch_; }  // the last call that was begun
    std::uint64_t taken_in(std::uint32_t rank) const {
        return taken_in_[rank];
    }  // after which call, last; 0: never left out
    std::uint32_t stage() const;  // of that call, by number
    bool hook_uncalled() const;
    // A rank to which a put fails is masked; else the call fails.
    void mask_what_fails(bool yes) { mask_what_fails_ = yes; }

    const LowLatencyShape& shape() const { return shape_; }
    const LowLatencyLayout& layout() const { return layout_; }
    const NodeTable& nodes() const { return shape_.nodes; }
    std::uint32_t rank() const { return shape_.rank; }
    bool near(std::uint32_t rank) const { return nodes().node_of(rank) == nodes().node_of(shape_.rank); }
    Port& port() const { return port_; }
    std::byte* control() const { return port_.memory()[shape_.rank].control; }
    std::byte* data() const { return port_.memory()[shape_.rank].data; }
    std::uint64_t data_bytes() const { return data_bytes_; }
    std::uint64_t half_bytes() const { return data_bytes_ / 2 / kAlignment * kAlignment; }
    std::uint64_t consumed_by(std::uint32_t rank) const;
    std::uint64_t consumed() const { return consumed_; }  // the last call that this rank has consumed, and all before

  private:
    friend class LowLatencyOperation;
    friend class LowLatencyDispatch;
    friend class LowLatencyCombine;

    // Bytes of my data region on their way out.
    struct Outgoing {
        Ticket ticket;
        std::uint64_t epoch = 0;
        std::uint32_t rank = 0;
        std::uint64_t from = 0;
        std::uint64_t to = 0;
        std::optional<std::uint64_t> word_before;  // of a flagged put: what it finds there
        bool given_up = false;  // its rank is masked and will not be told: the bytes may be overwritten
    };

    Refusal may_begin(const char* what) const;
    std::string call_error(const LowLatencyCall& call) const;
    std::string capacity_error(const LowLatencyCall& call) const;
    std::string moved_error(const LowLatencyCall& call) const;
    bool out_of(std::uint32_t rank, std::uint64_t call) const;
    bool takes_rows(std::uint32_t rank, std::uint64_t epoch) const;
    void begin(const std::shared_ptr<LowLatencyOperation>& operation);
    bool reap(std::uint32_t parity, std::uint32_t& rank, Status& status);  // false: one has failed
    bool in_flight(std::uint32_t parity, std::uint32_t rank) const;
    bool drains(std::uint64_t epoch) const;  // something of that call that was not given up is on its way out
    void give_up(std::uint32_t rank);
    std::optional<std::uint64_t> reserve(std::uint32_t parity, std::uint64_t bytes);
    void open_staging(std::uint32_t parity, std::uint64_t from, std::uint64_t to);
    bool put(std::uint32_t parity, const Port::Put& put, std::uint64_t epoch, std::uint64_t from, std::uint64_t to);
    bool put_part(std::uint32_t parity, const Port::Put& put, std::uint64_t epoch, std::uint64_t from,
                  std::uint64_t to);
    void packed(std::uint64_t epoch);
    bool tell();

    const LowLatencyShape shape_;
    const LowLatencyLayout layout_;
    Port& port_;
    const std::uint64_t data_bytes_;
    std::shared_ptr<const char> identity_;
    std::uint64_t epoch_ = 0;
    std::uint64_t consumed_ = 0;
    std::vector<std::uint64_t> packed_;  // calls above `consumed_` that were packed or failed alike on every rank
    std::uint64_t buffer_epoch_ = 0;     // the call that the combine buffer was handed out for
    std::shared_ptr<LowLatencyOperation> calls_[2];
    std::vector<Outgoing> outgoing_[2];
    struct Staging {
        std::uint64_t from = 0, next = 0, to = 0;
    } staging_[2];
    std::vector<std::uint8_t> masked_;
    bool mask_what_fails_ = false;
    std::vector<LateRows> late_;               // [ranks]: of one that was taken in again, as it was then
    std::vector<std::uint8_t> late_then_[2];   // [ranks]: may_come when the last call of the parity was consumed
    std::uint64_t block_bytes_[2] = {};        // of the last call of the parity
    std::vector<LowLatencyWord> sent_;         // [ranks]: the last call of which its rows are handed over, and how many
    std::vector<std::uint64_t> left_out_;      // [ranks]: from which call on it is masked
    std::vector<std::uint64_t> taken_in_;      // [ranks]
    std::vector<std::uint64_t> told_;          // [ranks]: what its word holds of my consumed
    std::vector<std::uint64_t> announced_[2];  // [ranks]: what its arrived word of the parity holds of me
};

}  // namespace expertwire::exchange
