// The two ends of a ring of one operation. A sender fills the slot of its next chunk, closes it, and goes on once a
// slot is free again: its chunk consumed (credit) and its put ended. A receiver reads chunks in order and gives credit
// for each.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "exchange/exchange.hpp"
#include "exchange/words.hpp"

namespace expertwire::exchange {

// Which ring, seen from one of its ends. `outer`: the pair's rank s, whose own node is another; a dispatch goes inward.
struct RingEnd {
    std::uint32_t peer = 0;                            // the rank at the other end
    std::uint64_t local_base = 0;                      // slot 0 here, bytes in my staging region
    std::uint64_t peer_base = 0;                       // slot 0 there
    RemoteWord peer_word = RemoteWord::arrived_inner;  // what a sender raises, or a receiver credits, at the peer
    std::uint64_t peer_word_offset = 0;                // of slot 0 where there is one per slot
    std::uint64_t my_word_offset = 0;  // credits (sender) or arrivals (receiver, slot 0), in my control region
};

RingEnd outer_sender(const Exchange& exchange, std::uint32_t node);      // dispatch: me to my entry in `node`
RingEnd inner_receiver(const Exchange& exchange, std::uint32_t source);  // dispatch: `source` to me, its entry
RingEnd inner_sender(const Exchange& exchange, std::uint32_t home);      // combine: me, the entry of `home`, to it
RingEnd outer_receiver(const Exchange& exchange, std::uint32_t node);    // combine: my entry in `node` to me

class SendRing {
  public:
    SendRing(Exchange& exchange, const RingEnd& end, std::uint64_t epoch, std::uint64_t chunks);

    // The slot of the next chunk, or null while none is free or a closed chunk waits to be put.
    std::byte* open();
    std::uint64_t peer_slot() const;  // the same slot at the other end, bytes in its staging region
    // The open chunk is complete: put it now or at a later flush(). Its first `bytes` leave from the slot; the rest, if
    // any, from and to where `apart` says, and stays as it is until the put has ended.
    void close(std::uint64_t bytes, const Port::Piece& apart = {});
    bool flush();                                // true if a waiting chunk was taken
    void reap();                                 // gives back what ended puts hold
    bool ended();                                // every chunk was put and every put has ended well
    Status failure() const { return failure_; }  // of the first put that failed, else ok

    std::uint32_t peer() const { return end_.peer; }
    std::uint64_t chunks() const { return chunks_; }
    std::uint64_t sent() const { return sent_; }
    std::uint64_t credited() const;

  private:
    bool reap(std::optional<Ticket>& ticket);  // true if it is absent now

    Exchange& exchange_;
    const RingEnd end_;
    const std::uint64_t epoch_;
    const std::uint64_t chunks_;
    std::uint64_t sent_ = 0;
    std::uint64_t closed_bytes_ = 0;              // of a chunk that waits to be put; 0: none
    Port::Piece apart_;                           // goes with it
    std::vector<std::optional<Ticket>> tickets_;  // [slot]
    Status failure_ = Status::ok;
};

class ReceiveRing {
  public:
    ReceiveRing(Exchange& exchange, const RingEnd& end, std::uint64_t epoch);

    const std::byte* front() const;  // the chunk to be read next, or null
    void pop();                      // it has been read: credit goes out now or at a later flush()
    bool flush();                    // true if credit that was owed has gone out
    bool settled() const { return credited_ == consumed_; }

    std::uint32_t peer() const { return end_.peer; }
    std::uint64_t consumed() const { return consumed_; }

  private:
    Exchange& exchange_;
    const RingEnd end_;
    const std::uint64_t epoch_;
    std::uint64_t consumed_ = 0;
    std::uint64_t credited_ = 0;
};

}  // namespace expertwire::exchange
