// Who is alive, and who is at fault (SPEC T19, E8). Signs of trouble with a peer: its pidfd, silence, a provider's
// error, the verdict of another rank. A sign is not yet a death: the peer may have told that it leaves, or whom *it*
// holds dead; then that one is named and not the messenger. Its last words may also have been lost: whoever saw a rank
// die leaves, and its connections break at once, while the dead one itself is missed only by its silence. So a broken
// connection is held against a peer only after every other one has been heard since.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/types.hpp"
#include "runtime/identity.hpp"
#include "runtime/memory.hpp"
#include "runtime/shared_block.hpp"

namespace expertwire::runtime {

// A dead peer: `rank` is the one at fault, `told_by` the rank whose verdict said so, or -1 where it was seen from here.
struct Fault {
    std::uint32_t rank = 0;
    std::int32_t told_by = -1;
    std::string why;
};

// What a peer last said about itself (SPEC E8). `age_ns`: since its heartbeat last changed, as seen here.
struct PeerPulse {
    std::uint64_t heartbeat = 0;
    std::uint64_t call_sequence = 0;
    std::uint64_t phase = 0;
    std::uint64_t low_latency_call = 0;
    std::uint64_t low_latency_told = 0;
    TimeNs age_ns = 0;
    bool leaving = false;
};

// absent → watched → suspected → dead | left → removed → watched. One table of transitions: move() in liveness.cpp. Of
// one that was removed nobody's word counts: it is said of the process that was.
enum class PeerState : std::uint8_t { absent = 0, watched, suspected, dead, left, removed };

struct LivenessOptions {
    std::uint32_t rank = 0;
    std::uint32_t size = 1;
    std::uint64_t instance = 1;  // of this rank's context; never 0
    TimeNs heartbeat_ns = 1'000'000'000;
    TimeNs silence_ns = 5'000'000'000;
    TimeNs grace_ns = 500'000'000;  // for another rank's verdict or the peer's own farewell to arrive
    bool use_pidfd = true;
    bool independent = false;  // ContextOptions::independent: a peer's trouble says nothing of another's, nobody judges
};

class Liveness {
  public:
    Liveness(const LivenessOptions& options, SharedBlock mine);

    // `instance`: who has the name now. What was said of another, or by another, counts for nothing.
    void add(std::uint32_t rank, const ProcessIdentity& process, std::uint64_t instance, TimeNs now);
    void remove(std::uint32_t rank);
    void map(std::uint32_t rank, SharedBlock theirs);  // its words are read there, until it is removed

    // The progress thread, a few times a second: looks at pidfds and heartbeats, decides what is ripe.
    void tick(TimeNs now);
    // For who maps us; the context adds the same over the fabric for the others.
    void beat();
    // A provider's error for that peer. Any thread.
    void suspect(std::uint32_t rank, const std::string& why, TimeNs now);

    bool has_fault() const { return has_fault_.load(std::memory_order_acquire); }
    std::optional<Fault> fault() const;                       // the first decided
    std::optional<Fault> fault_of(std::uint32_t rank) const;  // of that peer, where it is dead
    PeerState state(std::uint32_t rank) const;
    bool unreachable(std::uint32_t rank) const;  // dead or left
    bool has_left(std::uint32_t rank) const {    // cheap while nobody has
        return any_left_.load(std::memory_order_relaxed) && state(rank) == PeerState::left;
    }
    // Somebody else may yet turn out to be the reason for trouble with `rank` seen at `since`: a peer is suspected, or
    // has not been heard since. Ends by itself, in silence_ns + grace_ns and a few ticks.
    bool undecided(std::uint32_t rank, TimeNs since) const;
    PeerPulse pulse(std::uint32_t rank, TimeNs now) const;
    // Who has not come to that barrier, and may yet: who leaves arrives nowhere any more, and holds nobody up.
    std::vector<std::uint32_t> missing_at(std::uint64_t barrier) const;
    std::vector<std::uint32_t> take_deaths();  // ranks that will not answer any more, since the last call
    bool has_deaths() const { return deaths_pending_.load(std::memory_order_acquire); }
    std::uint64_t decided() const { return decided_.load(std::memory_order_acquire); }  // grows with each of them
    std::vector<int> pidfds() const;  // of watched peers, for the progress thread's poll

    void publish_call(std::uint64_t sequence, std::uint64_t phase);
    void publish_low_latency(std::uint64_t call, std::span<const std::uint64_t> told);  // told: by rank
    std::uint64_t low_latency_told(std::uint32_t rank) const;                           // what it last told me
    bool ended(std::uint32_t rank) const;           // it will not wake up: its process has exited, or it has left
    void publish_verdict(std::uint32_t dead_rank);  // the first one stays
    void publish_leaving();
    void publish_barrier(std::uint64_t epoch);
    // A peer that is being removed because it fell silent: it may wake up and hold me dead. Until it is added again.
    void publish_fenced(std::uint32_t rank, bool fenced);
    // What who does not map us must have been told: absolute values, so that the context can add the difference.
    struct Own {
        std::uint64_t heartbeat, call_sequence, phase, verdict, leaving, fenced, low_latency_call, low_latency_told;
    };
    Own own(std::uint32_t reader) const;

  private:
    struct Peer {
        PeerState state = PeerState::absent;
        std::uint64_t instance = 0;  // 0: absent or removed
        Descriptor pidfd;
        SharedBlock theirs;
        std::uint64_t last_heartbeat = 0;
        TimeNs changed_ns = 0;  // when the heartbeat last changed, or the watch began
        TimeNs heard_ns = 0;    // when its last beat was seen; our own absence changes nothing about it
        TimeNs suspected_ns = 0;
        TimeNs trouble_ns = 0;  // the others must have been heard after this; the last beat where silence was the sign
        bool fenced = false;    // by us
        bool has_us = false;    // it has been seen to have added us
        bool exited = false;    // its process
        bool final_word = false;  // the process is gone and its stores were visible at once: nothing more can arrive
        std::string why;
    };

    void look_for_the_end(Peer& peer);
    void look_at(std::uint32_t rank, Peer& peer, TimeNs now);
    void hear(std::uint32_t rank, Peer& peer, TimeNs now);
    void look_for_us(std::uint32_t rank, Peer& peer);
    bool removed_us(std::uint32_t rank) const;
    void forget_fault(std::uint32_t rank);
    const PulseBlock& words_of(std::uint32_t rank) const;
    const std::atomic<std::uint64_t>& told_by(std::uint32_t rank) const;  // its low-latency word for me
    bool fences(std::uint32_t rank, std::uint32_t messenger, std::uint32_t tag) const;
    bool may_be_earlier(std::uint32_t other, std::uint32_t rank, TimeNs since) const;
    bool others_decided(std::uint32_t rank, TimeNs since) const;
    void decide(std::uint32_t rank, Peer& peer, TimeNs now);
    void heed_verdict_of(std::uint32_t messenger);
    std::optional<std::uint32_t> verdict_of(std::uint32_t messenger) const;
    bool farewell_of(std::uint32_t rank) const;
    std::uint32_t tag_of(std::uint32_t rank) const;
    std::uint64_t verdict_about(std::uint32_t rank) const;
    std::uint32_t root_of(std::uint32_t accused) const;
    void suspect_locked(Peer& peer, const std::string& why, TimeNs now, TimeNs trouble_ns);
    void declare_dead(std::uint32_t rank, std::int32_t told_by, const std::string& why);
    void will_not_answer(std::uint32_t rank);
    void ring_news();
    void ring_mapped() const;
    std::uint64_t fenced_word() const;

    LivenessOptions options_;
    SharedBlock mine_;
    mutable std::mutex mutex_;
    std::vector<Peer> peers_;
    std::optional<Fault> first_;
    std::vector<std::uint32_t> deaths_;
    std::atomic<bool> has_fault_{false};
    std::atomic<bool> any_left_{false};
    std::atomic<bool> deaths_pending_{false};
    std::atomic<std::uint64_t> decided_{0};
    Own rung_{};  // verdict, leaving, fenced: as they were when those that map us were last woken for them
    TimeNs last_tick_ns_ = 0;
};

}  // namespace expertwire::runtime
