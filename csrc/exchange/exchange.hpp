// The high-throughput exchange as a state machine without a clock, a thread or a network (DESIGN "One token, high
// throughput"): the caller steps it, the simulation steps it, words arrive in memory, rows and puts leave.
//
// An Exchange is one rank's standing side; an Operation is one dispatch or combine on it. Operations of one Exchange
// come one after the other, in the same order on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exchange/handle.hpp"
#include "exchange/layout.hpp"
#include "exchange/port.hpp"

namespace expertwire::exchange {

enum class Kind : std::uint32_t { dispatch = 1, combine = 2 };

// Dispatch: rows of x go to the ranks that `in_rank` names. Pointers stay valid until the operation has ended.
struct DispatchRequest {
    const std::byte* x = nullptr;  // [tokens][row_bytes]
    std::uint64_t tokens = 0;
    std::uint64_t row_bytes = 0;
    Element element = Element::bfloat16;
    const std::byte* scales = nullptr;  // [tokens][scale_bytes]; unused where scale_bytes is 0
    std::uint32_t scale_bytes = 0;
    Element scale_element = Element::none;
    const std::uint8_t* in_rank = nullptr;   // bool[tokens][ranks]; unused with a handle
    const std::byte* topk_idx = nullptr;     // [tokens][topk] of index_bytes each, global ids, -1 none; may be null
    std::uint32_t index_bytes = 8;           // 4 or 8
    std::uint32_t topk = 0;                  // 0 without topk_idx
    const float* topk_weights = nullptr;     // [tokens][topk]; may be null
    const std::int32_t* per_rank = nullptr;  // i32[ranks], i32[nodes], i32[num_experts]: the caller's counts, checked
    const std::int32_t* per_node = nullptr;  // against in_rank and topk_idx; null: counted here
    const std::int32_t* per_expert = nullptr;
    std::uint64_t num_experts = 0;
    std::vector<std::uint64_t> expert_first;  // [ranks + 1]: rank r owns [first[r], first[r + 1]); empty with a handle
    std::uint64_t rows_max = 0;               // W: results have so many rows, whatever comes; 0: as many as come
    std::shared_ptr<const Handle> handle;     // repeat this routing, and its W
    std::uint64_t offer_offset = 0;           // where in my data region rows shall land, a multiple of 64
    std::uint64_t offer_capacity = 0;         // bytes
    // Where results are gathered when they do not fit what I offer: memory of so many bytes, 64-byte aligned.
    std::function<std::byte*(std::uint64_t bytes)> allocate;

    RowShape row() const { return {row_bytes, scale_bytes, topk, index_bytes, topk_weights != nullptr}; }
};

// Combine: what came by `handle` goes back, summed. A null pointer is an absent tensor.
struct CombineRequest {
    const std::byte* x = nullptr;  // bf16 [rows][row_bytes / 2]
    std::uint64_t rows = 0;        // the handle's received total
    std::uint64_t row_bytes = 0;
    const float* weights = nullptr;    // f32[rows][topk]
    std::uint32_t topk = 0;            // 0 without weights
    const std::byte* bias0 = nullptr;  // bf16 [tokens][row_bytes / 2]
    const std::byte* bias1 = nullptr;
    std::byte* out = nullptr;      // bf16 [tokens][row_bytes / 2]
    float* out_weights = nullptr;  // f32[tokens][topk]
    std::shared_ptr<const Handle> handle;
    std::uint64_t offer_offset = 0;    // where x is copied to unless it lies in my data region already
    std::uint64_t offer_capacity = 0;  // bytes

    RowShape row() const { return {row_bytes, 0, topk, 0, topk > 0}; }
};

enum class Step : std::uint8_t { progressed, waiting, done, failed };

// `exchange`: rows move. `drain`: every row is in place here, puts of mine or readers of mine are still under way.
enum class Phase : std::uint8_t { notify = 1, exchange, drain, done, failed };
const char* phase_name(Phase phase);

// `protocol`: a chunk is not what its ring must hold next: memory was overwritten, or the peer runs other code.
// `left_out`: of a low-latency call: others go on without this rank.
enum class FailureReason : std::uint8_t { none, mismatch, capacity, put, protocol, left_out };

struct Failure {
    FailureReason reason = FailureReason::none;
    std::uint32_t rank = 0;      // at fault
    Status status = Status::ok;  // put: how it ended
    std::string text;            // complete sentence: what, which ranks, both values
};

// One row per peer for the message of a wait that ran out (SPEC E8). Counts are rows unless named otherwise.
struct PeerProgress {
    std::uint32_t rank = 0;
    bool notified = false;            // its notify of this epoch is here
    std::uint64_t rows_expected = 0;  // from it to me; of another node's entry in a combine: its node's sums
    std::uint64_t rows_arrived = 0;
    std::uint64_t chunks_to_send = 0;  // through the fabric, to it
    std::uint64_t chunks_sent = 0;
    std::uint64_t chunks_credited = 0;  // that it has consumed
    std::string missing;                // what is waited for from it, empty when nothing
};

class Exchange;

// Words of a rank of another node that this rank adds to; it is their only writer.
enum class RemoteWord : std::uint8_t {
    notified_even = 0,
    notified_odd,
    credit_outer,   // I am its entry: chunks of its dispatch that I consumed
    credit_inner,   // it is my entry: chunks of my combine that I consumed
    arrived_inner,  // one per slot; it is my entry: a chunk of my dispatch
    arrived_outer,  // one per slot; I am its entry: a chunk of its combine
};

class Operation {
  public:
    virtual ~Operation() = default;
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    // Moves at most about `budget` bytes of whatever can move and returns. Never blocks. After done or failed it does
    // nothing. `failed` by mismatch or capacity leaves the exchange usable (every rank fails the same way and no row
    // has left); any other failure does not.
    Step step(std::uint64_t budget);

    Kind kind() const { return kind_; }
    std::uint64_t epoch() const { return epoch_; }
    Phase phase() const { return phase_; }
    const Failure& failure() const { return failure_; }
    std::vector<PeerProgress> progress() const;
    virtual std::uint64_t chunks_sent() const = 0;  // through the fabric, to all ranks

  protected:
    Operation(Exchange& exchange, Kind kind, std::shared_ptr<const Handle> handle);

    // What the two kinds fill in.
    struct Need {
        std::uint64_t rows = 0;
        std::uint64_t bytes = 0;
    };
    virtual Need needed(std::uint32_t rank) const = 0;     // of the extent that the rank offered
    virtual void begin() = 0;                              // all notifies agree: every offset is known
    virtual std::uint64_t move(std::uint64_t budget) = 0;  // bytes moved, ≥ 1 if anything happened
    virtual bool rows_done() const = 0;                    // exchange → drain
    virtual bool drained() = 0;                            // drain → done; puts of mine included
    virtual void describe(PeerProgress& row) const = 0;

    void fail(FailureReason reason, std::uint32_t rank, std::string text, Status status = Status::ok);
    void send_notify(NotifyHeader header, const std::uint32_t* per_rank, const std::uint32_t* per_node,
                     const std::int32_t* per_expert, const std::vector<std::uint64_t>& expert_first);
    const NotifyHeader& notify(std::uint32_t source) const;          // of this epoch, valid once begin() is called
    const std::uint32_t* notify_counts(std::uint32_t source) const;  // per rank, per node, per local expert of mine

    // Words of this epoch.
    std::uint32_t count_at(std::uint64_t word_offset) const;  // in my control region; 0 while it is of an older epoch
    void publish(std::uint32_t rank, std::uint64_t word_offset, std::uint64_t count);  // to a rank of my node
    std::byte* control_of(std::uint32_t rank) const;

    Exchange& exchange_;
    const Kind kind_;
    const std::uint64_t epoch_;
    const std::shared_ptr<const Handle> handle_;  // given; null for a dispatch that makes one
    Phase phase_ = Phase::notify;
    Failure failure_;

  private:
    Step step_notify();
    bool post_notifies();  // true if one was taken
    bool notifies_here();
    bool agree();
    bool check_capacity();
    bool notifies_ended();

    std::vector<std::uint32_t> unsent_;  // ranks of other nodes whose notify is still to be put
    struct NotifyPut {
        std::uint32_t rank;
        Ticket ticket;
    };
    std::vector<NotifyPut> notifies_;  // under way
    std::uint32_t notified_ = 0;       // ranks below this have been heard in this epoch
};

class Dispatch;
class Combine;

class Exchange {
  public:
    // `port` and its memory outlive the exchange. Control memory must be zeroed once before the first operation.
    Exchange(const Shape& shape, Port& port, std::uint64_t data_bytes);
    ~Exchange() = default;
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    // The next operation's epoch is `epoch` + 1. Before the first one, the same on every rank: tests begin near a
    // limit.
    void start_after(std::uint64_t epoch) { epoch_ = epoch; }

    // Null and `error` filled: an argument cannot be used, or the epochs are used up; nothing was started. Else the
    // caller steps the operation to its end before it starts another.
    std::unique_ptr<Dispatch> dispatch(const DispatchRequest& request, std::string& error);
    std::unique_ptr<Combine> combine(const CombineRequest& request, std::string& error);

    const Shape& shape() const { return layout_.shape(); }
    const Layout& layout() const { return layout_; }
    const NodeTable& nodes() const { return layout_.shape().nodes; }
    std::uint32_t rank() const { return layout_.shape().rank; }
    std::uint32_t node() const { return nodes().node_of(rank()); }
    Port& port() const { return port_; }
    const RankMemory& mine() const { return port_.memory()[rank()]; }
    std::uint64_t data_bytes() const { return data_bytes_; }

    // Put bytes or nothing and bring a remote word to `value`, by adding what it lacks. False/none: would block.
    std::optional<Ticket> put(Port::Put put, RemoteWord word, std::uint32_t slot, std::uint64_t word_offset,
                              std::uint64_t value);
    bool raise(std::uint32_t rank, RemoteWord word, std::uint64_t word_offset, std::uint64_t value);
    const std::shared_ptr<const char>& identity() const { return identity_; }

  private:
    friend class Operation;

    std::uint64_t& known(std::uint32_t rank, RemoteWord word, std::uint32_t slot);
    std::string epoch_error() const;
    std::string extent_error(std::uint64_t offset, std::uint64_t capacity) const;
    std::string handle_error(const std::shared_ptr<const Handle>& handle) const;
    std::shared_ptr<Handle> make_handle(const DispatchRequest& request, std::string& error) const;

    Layout layout_;
    Port& port_;
    std::uint64_t data_bytes_;
    std::shared_ptr<const char> identity_;
    std::uint64_t epoch_ = 0;
    std::vector<std::vector<std::uint64_t>> remote_words_;  // [rank]: what I have added up there
};

}  // namespace expertwire::exchange
