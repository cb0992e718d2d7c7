// Counted immediates (ordering class C), without a network: who posts, sends and polls calls this. Every counted write
// carries 32 bits: the number under which its target knows the source (16), and a tag (16). The target acknowledges
// each tag once its bytes are in place; a signal names the tags that it covers and that were not acknowledged yet, and
// the target adds when all of them have come. docs/counted_immediates.md says why that is safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/types.hpp"

namespace expertwire {

inline constexpr std::uint32_t counted_tags_max = 1u << 16;

// out → free: acknowledged. out → orphan: its owner has ended without that (an error, a closed endpoint), and the
// immediate may still come: the tag must not be used again before it has.
enum class TagState : std::uint8_t { free = 0, out, orphan };
enum class TagEvent : std::uint8_t { post = 0, undo, acknowledge, abandon };

// What of a tag the target knows. dead: its source has said that it will most likely never come.
enum class ArrivalState : std::uint8_t { awaited = 0, dead };

// A signal on its way: what the target adds, and under which ticket it answers. Opaque here.
struct CountedSignal {
    std::uint64_t ticket = 0;
    std::uint32_t region = 0;
    std::uint32_t registration = 0;
    std::uint64_t offset = 0;
    std::uint64_t operand = 0;
};

// What has ended at the source: a write that was acknowledged, or a signal that was answered.
struct CountedEnd {
    Ticket ticket;
    bool signal = false;
    Status status = Status::ok;
};

struct CountedCounters {
    std::uint64_t immediates = 0, signals_added = 0, signals_waited = 0, signals_aborted = 0;
    std::uint64_t strays = 0;   // immediates under a number or a tag that nobody has
    std::uint64_t dropped = 0;  // messages that made no sense
};

class Counting {
  public:
    // `message_bytes_max`: of one message, at least 64. `apply` adds a signal at the target and says how that went.
    // Acknowledgements alone wait for as many turns as `patience`: most likely an answer follows that takes them along.
    Counting(std::uint32_t tags, std::size_t message_bytes_max, std::uint32_t patience,
             std::function<Status(PeerId source, const CountedSignal&)> apply);

    // ---- the source
    // The peer has told us our number, and tags are left. Asks for it where it has not.
    bool counts(PeerId peer);
    // The write's immediate data; nullopt: not now (would_block). `request`: whose signal covers it, if one does.
    std::optional<std::uint32_t> begin_write(PeerId peer, Ticket write, Ticket request);
    void undo_write(PeerId peer, std::uint32_t immediate);     // the network did not take it
    void abandon_write(PeerId peer, std::uint32_t immediate);  // ended without an acknowledgement
    // The message of a request's signal. 0: all of its writes have been acknowledged, send an ordinary signal.
    // nullopt: not now (would_block).
    std::optional<std::size_t> encode_signal(PeerId peer, Ticket request, const CountedSignal& signal,
                                             std::span<std::byte> out);
    std::vector<CountedEnd>& ended() { return ended_; }  // to be emptied by the caller

    // ---- the target
    void immediate(std::uint32_t data);

    // ---- both
    void message(PeerId from, std::span<const std::byte> bytes);
    // From here on the peer is this process. What another one under its name was told is never given out again, and
    // what that one still sends changes nothing.
    void meet(PeerId peer, std::uint64_t incarnation);
    // Nothing of ours goes there any more, and what has gone is not waited for. What comes from there still counts, for
    // the peer may know us still.
    void leave(PeerId peer);

    // Once in each turn, before what is to be sent is taken.
    void turn() { ++turns_; }
    // What is to be sent, in any order. front() is null where there is nothing.
    struct Outgoing {
        PeerId peer;
        std::vector<std::byte> bytes;
    };
    const Outgoing* front();
    void sent() { outbox_.pop_front(); }
    void postpone();  // behind the others: one peer that cannot be reached must not hold them up
    bool idle() const { return outbox_.empty() && unanswered_.empty(); }

    const CountedCounters& counters() const { return counters_; }

  private:
    static constexpr std::uint32_t none = 0xffff'ffff;

    struct Tag {
        TagState state = TagState::free;
        std::uint16_t use = 0;  // counts its uses, as the target does
        Ticket write;
        Ticket request;
        std::uint32_t previous = none, next = none;  // of its request, those not acknowledged
    };
    struct Source {
        std::optional<std::uint32_t> number;
        std::uint64_t question = 0;  // asked; the same one each time
        std::uint32_t attempts = 0;  // to count, without an answer so far
        std::uint32_t ask_at = 0;
        std::vector<Tag> tags;
        std::vector<std::uint16_t> free;
    };
    struct Group {
        std::uint32_t generation = 0;
        std::uint32_t number = 0;  // under which its tags were taken
        std::uint32_t first = none;
    };
    struct Arrival {
        ArrivalState state = ArrivalState::awaited;
        std::uint16_t uses = 0;        // immediates of this tag so far
        std::uint32_t waiting = none;  // the signal that waits for the next one
    };
    struct Waiting {
        CountedSignal signal;
        std::uint32_t missing = 0;
        std::vector<std::uint16_t> tags;
    };
    struct Answer {
        std::uint64_t ticket = 0;
        Status status = Status::ok;
    };
    struct Target {
        PeerId peer;
        std::uint64_t incarnation = 0;
        std::uint64_t question = 0;
        std::vector<Arrival> arrivals;
        std::vector<Waiting> waiting;
        std::vector<std::uint32_t> free_waiting;
        std::vector<std::uint16_t> acknowledged;  // not told yet
        std::vector<Answer> answers;              // not told yet
        bool listed = false;                      // in unanswered_
        std::uint64_t listed_at = 0;              // the turn
    };

    static bool advance(Tag& tag, TagEvent event);
    Source& source_of(PeerId peer);
    Tag* tag_of(PeerId peer, std::uint32_t immediate);
    void ask(PeerId peer, Source& source);
    void link(Tag& tag, std::uint32_t index);
    void unlink(Source& source, Tag& tag);
    void release(Source& source, std::uint32_t index);
    void number_given(PeerId from, std::uint64_t question, std::uint32_t number, std::uint32_t tags);
    void answered(PeerId from, std::uint32_t number, std::span<const std::byte> bytes);
    void asked(PeerId from, std::uint64_t question);
    void signalled(PeerId from, std::uint32_t number, std::span<const std::byte> bytes);
    void declared_dead(std::uint32_t number, std::span<const std::byte> bytes);
    Target* target_of(std::uint32_t number) {
        return number < targets_.size() && targets_[number] ? targets_[number].get() : nullptr;
    }
    void wait(Target& target, Waiting waiting);
    void add(Target& target, std::uint32_t number, const CountedSignal& signal);
    void end_waiting(Target& target, std::uint32_t index);
    void tell(Target& target, std::uint32_t number, Answer answer);
    void list(Target& target, std::uint32_t number);
    bool waits(const Target& target) const;
    void collect(std::uint32_t number);

    std::uint32_t tags_;
    std::size_t message_bytes_max_;
    std::uint32_t patience_;
    std::uint64_t turns_ = 0;
    std::function<Status(PeerId, const CountedSignal&)> apply_;
    std::vector<std::unique_ptr<Source>> sources_;  // by PeerId
    std::vector<Group> groups_;                     // by request slot
    std::vector<std::uint64_t> incarnations_;       // by PeerId
    std::vector<std::unique_ptr<Target>> targets_;  // by number; null: retired
    std::vector<std::uint32_t> unanswered_;         // numbers with something to tell
    std::deque<Outgoing> outbox_;
    std::vector<CountedEnd> ended_;
    std::uint64_t questions_ = 0;
    CountedCounters counters_;
};

}  // namespace expertwire
