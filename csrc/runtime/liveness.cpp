#include "runtime/liveness.hpp"

#include <poll.h>

#include <algorithm>
#include <utility>

namespace expertwire::runtime {

namespace {

// A peer that has never been heard may still be on its way to start().
constexpr TimeNs first_heartbeat_factor = 6;

// The whole life of a peer, from here. Returns false where the table has no such step, and then nothing changes.
bool move(PeerState& state, PeerState next) {
    static constexpr bool allowed[6][6] = {
        // to:   absent watched suspected dead left removed
        /*absent*/ {true, true, false, false, false, true},
        /*watched*/ {false, true, true, true, true, true},
        /*suspected*/ {false, false, true, true, true, true},
        /*dead*/ {false, false, false, false, false, true},
        /*left*/ {false, false, false, false, false, true},
        /*removed*/ {false, true, false, false, false, true},
    };
    if (!allowed[static_cast<int>(state)][static_cast<int>(next)]) return false;
    state = next;
    return true;
}

bool exited(int pidfd) {
    pollfd entry{pidfd, POLLIN, 0};
    return poll(&entry, 1, 0) == 1 && (entry.revents & POLLIN) != 0;
}

}  // namespace

Liveness::Liveness(const LivenessOptions& options, SharedBlock mine)
    : options_(options), mine_(mine), peers_(options.size) {}

void Liveness::add(std::uint32_t rank, const ProcessIdentity& process, std::uint64_t instance, TimeNs now) {
    bool gone = false;
    const int fd = options_.use_pidfd && rank != options_.rank ? open_pidfd(process, gone) : -1;
    const std::lock_guard lock(mutex_);
    Peer& peer = peers_[rank];
    if (rank == options_.rank || (peer.state != PeerState::absent && peer.state != PeerState::removed)) {
        Descriptor unused(fd);
        return;
    }
    move(peer.state, PeerState::watched);
    peer.instance = instance;
    peer.pidfd = Descriptor(fd);
    peer.last_heartbeat = words_of(rank).heartbeat.load(std::memory_order_acquire);
    mine_.about(rank).has.store(instance, std::memory_order_release);
    peer.changed_ns = peer.heard_ns = now;
    peer.exited = gone;
    if (gone) {
        peer.final_word = true;
        suspect_locked(peer, "its process (pid " + std::to_string(process.pid) + ") has exited", now, now);
        decide(rank, peer, now);
    }
}

void Liveness::remove(std::uint32_t rank) {
    const std::lock_guard lock(mutex_);
    const bool fenced = peers_[rank].fenced;
    peers_[rank] = Peer{};
    peers_[rank].fenced = fenced;
    move(peers_[rank].state, PeerState::removed);
    mine_.about(rank).has.store(0, std::memory_order_release);
    mine_.about(rank).low_latency_told.store(0, std::memory_order_release);
    std::erase(deaths_, rank);  // of the one that was: the engine would take it for its successor's
    // Another one may come back under its name: no word of ours must stand against that.
    forget_fault(rank);
}

void Liveness::forget_fault(std::uint32_t rank) {
    if (first_ && first_->rank == rank) first_.reset();
    for (std::uint32_t other = 0; !first_ && other < peers_.size(); ++other)
        if (peers_[other].state == PeerState::dead) first_ = Fault{other, -1, peers_[other].why};
    std::atomic<std::uint64_t>& verdict = mine_.own().verdict;
    const std::uint64_t said = verdict.load(std::memory_order_relaxed);
    if (said != 0 && Verdict::of(said).accused == rank)
        verdict.store(first_ ? verdict_about(first_->rank) : 0, std::memory_order_release);
    has_fault_.store(first_.has_value(), std::memory_order_release);
}

void Liveness::map(std::uint32_t rank, SharedBlock theirs) {
    const std::lock_guard lock(mutex_);
    peers_[rank].theirs = theirs;
    peers_[rank].last_heartbeat = words_of(rank).heartbeat.load(std::memory_order_acquire);
}

const PulseBlock& Liveness::words_of(std::uint32_t rank) const {
    return peers_[rank].theirs.present() ? peers_[rank].theirs.own() : mine_.pulse(rank);
}

void Liveness::tick(TimeNs now) {
    const std::lock_guard lock(mutex_);
    // While our own thread did not run nobody could be heard: that time is not held against the others.
    const TimeNs gap = last_tick_ns_ == 0 ? 0 : now - last_tick_ns_;
    const TimeNs excused = gap > options_.heartbeat_ns ? gap - options_.heartbeat_ns : 0;
    last_tick_ns_ = now;
    const auto open = [](const Peer& peer) {
        return peer.state == PeerState::watched || peer.state == PeerState::suspected;
    };
    for (std::uint32_t rank = 0; rank < peers_.size(); ++rank) {
        Peer& peer = peers_[rank];
        look_for_the_end(peer);
        if (!open(peer)) continue;
        peer.changed_ns = std::min(now, peer.changed_ns + excused);
        if (peer.state == PeerState::suspected) peer.suspected_ns = std::min(now, peer.suspected_ns + excused);
        look_at(rank, peer, now);
        look_for_us(rank, peer);
    }
    // Everybody's words before anybody's sentence; one that has left may have said why before. What a dead one says
    // after its sentence is said by one that was stopped, and is waking up into a world that went on.
    for (std::uint32_t rank = 0; rank < peers_.size(); ++rank)
        if (open(peers_[rank]) || peers_[rank].state == PeerState::left) heed_verdict_of(rank);
    for (std::uint32_t rank = 0; rank < peers_.size(); ++rank)
        if (open(peers_[rank])) decide(rank, peers_[rank], now);
}

void Liveness::hear(std::uint32_t rank, Peer& peer, TimeNs now) {
    const std::uint64_t heartbeat = words_of(rank).heartbeat.load(std::memory_order_acquire);
    if (heartbeat == peer.last_heartbeat) return;
    peer.last_heartbeat = heartbeat;
    peer.changed_ns = peer.heard_ns = now;
}

// As far as can be seen: by who maps it. Then its words are said to another.
bool Liveness::removed_us(std::uint32_t rank) const {
    const SharedBlock& theirs = peers_[rank].theirs;
    return theirs.present() && theirs.about(options_.rank).has.load(std::memory_order_acquire) != options_.instance;
}

// One that was stopped learns so when it wakes up: its name is another's there, or nobody's because it fell silent. A
// peer that removes us for another reason may add us again.
void Liveness::look_for_us(std::uint32_t rank, Peer& peer) {
    if (!peer.theirs.present()) return;
    const std::uint64_t has = peer.theirs.about(options_.rank).has.load(std::memory_order_acquire);
    if (has == options_.instance) {
        peer.has_us = true;
        if (first_ && first_->rank == options_.rank && first_->told_by == static_cast<std::int32_t>(rank))
            forget_fault(options_.rank);
        return;
    }
    const std::uint64_t fenced = peer.theirs.own().fenced.load(std::memory_order_acquire);
    if (!peer.has_us || first_ || (has == 0 && (fenced >> (options_.rank % 64) & 1) == 0)) return;
    declare_dead(options_.rank, static_cast<std::int32_t>(rank), "rank " + std::to_string(rank) + " has removed it");
}

// Also of one that was held dead before, for its silence or for what failed: until then it might have woken up.
void Liveness::look_for_the_end(Peer& peer) {
    if (peer.pidfd.get() < 0 || !exited(peer.pidfd.get())) return;
    peer.pidfd.reset();
    peer.exited = true;
}

void Liveness::look_at(std::uint32_t rank, Peer& peer, TimeNs now) {
    hear(rank, peer, now);
    if (peer.state != PeerState::watched) return;
    if (peer.exited) {
        peer.final_word = peer.theirs.present();
        suspect_locked(peer, "its process has exited", now, now);
        return;
    }
    if (peer.pidfd.get() >= 0) return;
    const TimeNs limit = peer.last_heartbeat == 0 ? first_heartbeat_factor * options_.silence_ns : options_.silence_ns;
    const TimeNs silent = now - std::min(now, peer.changed_ns);
    if (silent >= limit)
        suspect_locked(peer,
                       "no heartbeat for " + std::to_string(silent / 1'000'000) + " ms (limit " +
                           std::to_string(limit / 1'000'000) + " ms)" +
                           (peer.last_heartbeat == 0 ? "; it was never heard: it may not have added this rank" : ""),
                       now, peer.heard_ns);
}

// 0: nobody known here has that name.
std::uint32_t Liveness::tag_of(std::uint32_t rank) const {
    const std::uint64_t instance = rank == options_.rank ? options_.instance : peers_[rank].instance;
    return instance == 0 ? 0 : Verdict::tag(instance);
}

std::uint64_t Liveness::verdict_about(std::uint32_t rank) const {
    return Verdict{rank, tag_of(rank), Verdict::tag(options_.instance)}.word();
}

// Of one that is not known yet any word may be its own.
bool Liveness::farewell_of(std::uint32_t rank) const {
    const std::uint64_t leaving = words_of(rank).leaving.load(std::memory_order_acquire);
    return leaving != 0 && (leaving == peers_[rank].instance || peers_[rank].state == PeerState::absent);
}

// Whom it holds dead, if that counts. It does not where accuser or accused is another process than has that name now;
// nor where the accused has removed the accuser: that one was stopped, woke up, and found the accused's endpoint gone.
std::optional<std::uint32_t> Liveness::verdict_of(std::uint32_t messenger) const {
    if (options_.independent) return std::nullopt;  // its numbers are its own
    const std::uint64_t word = words_of(messenger).verdict.load(std::memory_order_acquire);
    const Verdict verdict = Verdict::of(word);
    const std::uint32_t accused = verdict.accused;
    if (word == 0 || accused >= peers_.size() || accused == messenger) return std::nullopt;
    if (verdict.speaker_tag != tag_of(messenger)) return std::nullopt;
    if (tag_of(accused) != 0 && verdict.accused_tag != tag_of(accused)) return std::nullopt;
    if (fences(accused, messenger, verdict.speaker_tag)) return std::nullopt;
    return accused;
}

// Has that rank removed the messenger, or another process under its name? Only who maps that rank sees the second.
bool Liveness::fences(std::uint32_t rank, std::uint32_t messenger, std::uint32_t tag) const {
    const bool ours = rank == options_.rank;
    const PulseBlock& words = ours ? mine_.own() : words_of(rank);
    if ((words.fenced.load(std::memory_order_acquire) >> (messenger % 64) & 1) != 0) return true;
    const SharedBlock& block = ours ? mine_ : peers_[rank].theirs;
    const std::uint64_t has = block.present() ? block.about(messenger).has.load(std::memory_order_acquire) : 0;
    return has != 0 && Verdict::tag(has) != tag;
}

// Whom the accused itself holds dead, and so on: who accuses another one is a messenger, however the word came here.
std::uint32_t Liveness::root_of(std::uint32_t accused) const {
    std::uint32_t root = accused;
    for (std::size_t step = 0; step < peers_.size(); ++step) {
        if (root == options_.rank) return root;
        const std::optional<std::uint32_t> next = verdict_of(root);
        if (!next) return root;
        root = *next;
    }
    return accused;  // they accuse each other
}

void Liveness::heed_verdict_of(std::uint32_t messenger) {
    const std::optional<std::uint32_t> named = verdict_of(messenger);
    if (!named) return;
    const std::uint32_t accused = root_of(*named);
    if (accused == messenger) return;
    const PeerState state = peers_[accused].state;
    // Known, or of a process that was; of one that is not added yet the word stands until it is.
    if (accused != options_.rank && (state >= PeerState::dead || state == PeerState::absent)) return;
    if (first_ && first_->rank == accused) return;
    declare_dead(accused, static_cast<std::int32_t>(messenger),
                 "rank " + std::to_string(messenger) + " declared it dead");
}

// Could the trouble with `rank` that began at `since` be the consequence of what happened to `other`?
bool Liveness::may_be_earlier(std::uint32_t other, std::uint32_t rank, TimeNs since) const {
    const Peer& peer = peers_[other];
    if (peer.state == PeerState::suspected) {
        if (peers_[rank].state != PeerState::suspected) return true;
        // The messenger lived on after the dead one's last beat. Both fell silent: who did so first.
        const TimeNs heard = peers_[rank].heard_ns;
        return peer.heard_ns < heard || (peer.heard_ns == heard && other < rank);
    }
    if (peer.state != PeerState::watched) return false;
    if (peer.pidfd.get() >= 0) return exited(peer.pidfd.get());
    return peer.heard_ns <= since;
}

bool Liveness::others_decided(std::uint32_t rank, TimeNs since) const {
    if (options_.independent) return true;
    for (std::uint32_t other = 0; other < peers_.size(); ++other)
        if (other != rank && other != options_.rank && may_be_earlier(other, rank, since)) return false;
    return true;
}

bool Liveness::undecided(std::uint32_t rank, TimeNs since) const {
    const std::lock_guard lock(mutex_);
    return peers_[rank].state == PeerState::suspected || !others_decided(rank, since);
}

void Liveness::decide(std::uint32_t rank, Peer& peer, TimeNs now) {
    const bool farewell = farewell_of(rank);
    if (peer.state != PeerState::suspected) {
        if (!farewell || !move(peer.state, PeerState::left)) return;
        any_left_.store(true, std::memory_order_relaxed);
        // Ranks of a job end together, and what is on its way ends by itself. Here somebody may still want something.
        if (options_.independent) will_not_answer(rank);
        return;
    }
    // It ended because it had seen another one die, and has said so: the other is at fault, and is already declared.
    if (farewell || verdict_of(rank)) {
        move(peer.state, PeerState::left);
        any_left_.store(true, std::memory_order_relaxed);
        will_not_answer(rank);
        return;
    }
    const TimeNs waited = now - std::min(now, peer.suspected_ns);
    if (!peer.final_word && waited < options_.grace_ns) return;
    // A rank that fell silent before this one's trouble is found out by then, and told.
    const TimeNs limit = options_.silence_ns + 3 * options_.grace_ns;
    if (!peer.final_word && !first_ && waited < limit && !others_decided(rank, peer.trouble_ns)) return;
    declare_dead(rank, -1, peer.why);
}

void Liveness::suspect(std::uint32_t rank, const std::string& why, TimeNs now) {
    const std::lock_guard lock(mutex_);
    if (rank >= peers_.size() || peers_[rank].state != PeerState::watched) return;
    // Beats that came before the trouble, and that the next tick would take for later ones.
    for (std::uint32_t other = 0; other < peers_.size(); ++other)
        if (peers_[other].state == PeerState::watched) hear(other, peers_[other], now);
    suspect_locked(peers_[rank], why, now, now);
}

void Liveness::suspect_locked(Peer& peer, const std::string& why, TimeNs now, TimeNs trouble_ns) {
    if (!move(peer.state, PeerState::suspected)) return;
    peer.suspected_ns = now;
    peer.trouble_ns = trouble_ns;
    peer.why = why;
}

void Liveness::declare_dead(std::uint32_t rank, std::int32_t told_by, const std::string& why) {
    if (rank != options_.rank) {
        Peer& peer = peers_[rank];
        if (!move(peer.state, PeerState::dead)) return;
        peer.why = why;
        will_not_answer(rank);
    }
    std::atomic<std::uint64_t>& verdict = mine_.own().verdict;
    if (!options_.independent && verdict.load(std::memory_order_relaxed) == 0)
        verdict.store(verdict_about(rank), std::memory_order_release);
    if (!first_) first_ = Fault{rank, told_by, why};
    decided_.fetch_add(1, std::memory_order_acq_rel);
    has_fault_.store(true, std::memory_order_release);
}

std::optional<Fault> Liveness::fault() const {
    const std::lock_guard lock(mutex_);
    return first_;
}

std::optional<Fault> Liveness::fault_of(std::uint32_t rank) const {
    const std::lock_guard lock(mutex_);
    if (rank >= peers_.size() || peers_[rank].state != PeerState::dead) return std::nullopt;
    return Fault{rank, -1, peers_[rank].why};
}

PeerState Liveness::state(std::uint32_t rank) const {
    const std::lock_guard lock(mutex_);
    return peers_[rank].state;
}

bool Liveness::unreachable(std::uint32_t rank) const {
    const PeerState now = state(rank);
    return now == PeerState::dead || now == PeerState::left;
}

PeerPulse Liveness::pulse(std::uint32_t rank, TimeNs now) const {
    const std::lock_guard lock(mutex_);
    const PulseBlock& block = words_of(rank);
    PeerPulse pulse;
    pulse.heartbeat = block.heartbeat.load(std::memory_order_acquire);
    pulse.call_sequence = block.call_sequence.load(std::memory_order_acquire);
    pulse.phase = block.phase.load(std::memory_order_acquire);
    pulse.low_latency_call = block.low_latency_call.load(std::memory_order_acquire);
    pulse.low_latency_told = told_by(rank).load(std::memory_order_acquire);
    const Peer& peer = peers_[rank];
    pulse.leaving = farewell_of(rank);
    pulse.age_ns = peer.state == PeerState::absent || peer.state == PeerState::removed ||
                           pulse.heartbeat != peer.last_heartbeat || now < peer.changed_ns
                       ? 0
                       : now - peer.changed_ns;
    return pulse;
}

std::vector<std::uint32_t> Liveness::missing_at(std::uint64_t barrier) const {
    std::vector<std::uint32_t> missing;
    const std::lock_guard lock(mutex_);
    for (std::uint32_t rank = 0; rank < peers_.size(); ++rank) {
        if (rank == options_.rank) continue;
        const bool arrived = words_of(rank).barrier.load(std::memory_order_acquire) >= barrier && !removed_us(rank);
        if (!arrived && !farewell_of(rank)) missing.push_back(rank);
    }
    return missing;
}

std::vector<std::uint32_t> Liveness::take_deaths() {
    const std::lock_guard lock(mutex_);
    deaths_pending_.store(false, std::memory_order_release);
    return std::exchange(deaths_, {});
}

void Liveness::will_not_answer(std::uint32_t rank) {
    deaths_.push_back(rank);
    deaths_pending_.store(true, std::memory_order_release);
    decided_.fetch_add(1, std::memory_order_acq_rel);
}

std::vector<int> Liveness::pidfds() const {
    const std::lock_guard lock(mutex_);
    std::vector<int> fds;
    for (const Peer& peer : peers_)
        if (peer.state == PeerState::watched && peer.pidfd.get() >= 0) fds.push_back(peer.pidfd.get());
    return fds;
}

void Liveness::beat() {
    mine_.own().heartbeat.fetch_add(1, std::memory_order_relaxed);
    ring_news();
}

void Liveness::publish_call(std::uint64_t sequence, std::uint64_t phase) {
    mine_.own().call_sequence.store(sequence, std::memory_order_relaxed);
    mine_.own().phase.store(phase, std::memory_order_relaxed);
}

void Liveness::publish_low_latency(std::uint64_t call, std::span<const std::uint64_t> told) {
    mine_.own().low_latency_call.store(call, std::memory_order_release);
    for (std::uint32_t rank = 0; rank < std::min(told.size(), peers_.size()); ++rank)
        mine_.about(rank).low_latency_told.store(told[rank], std::memory_order_release);
}

const std::atomic<std::uint64_t>& Liveness::told_by(std::uint32_t rank) const {
    const SharedBlock& theirs = peers_[rank].theirs;
    return theirs.present() ? theirs.about(options_.rank).low_latency_told : mine_.pulse(rank).low_latency_told;
}

std::uint64_t Liveness::low_latency_told(std::uint32_t rank) const {
    const std::lock_guard lock(mutex_);
    return told_by(rank).load(std::memory_order_acquire);
}

bool Liveness::ended(std::uint32_t rank) const {
    const std::lock_guard lock(mutex_);
    return peers_[rank].exited || peers_[rank].state == PeerState::left;
}

void Liveness::publish_verdict(std::uint32_t dead_rank) {
    {
        const std::lock_guard lock(mutex_);
        std::atomic<std::uint64_t>& verdict = mine_.own().verdict;
        if (verdict.load(std::memory_order_relaxed) == 0)
            verdict.store(verdict_about(dead_rank), std::memory_order_release);
    }
    ring_news();
}

void Liveness::publish_leaving() {
    mine_.own().leaving.store(options_.instance, std::memory_order_release);
    ring_news();
}

void Liveness::publish_barrier(std::uint64_t epoch) {
    const std::lock_guard lock(mutex_);
    mine_.own().barrier.store(epoch, std::memory_order_release);
    ring_mapped();
}

void Liveness::publish_fenced(std::uint32_t rank, bool fenced) {
    if (options_.independent) return;  // no verdict counts that this would be held against
    {
        const std::lock_guard lock(mutex_);
        if (peers_[rank].fenced == fenced) return;
        peers_[rank].fenced = fenced;
        mine_.own().fenced.store(fenced_word(), std::memory_order_release);
    }
    ring_news();
}

std::uint64_t Liveness::fenced_word() const {
    std::uint64_t word = 0;
    for (std::uint32_t rank = 0; rank < peers_.size(); ++rank)
        if (peers_[rank].fenced) word |= std::uint64_t{1} << (rank % 64);
    return word;
}

Liveness::Own Liveness::own(std::uint32_t reader) const {
    const PulseBlock& words = mine_.own();
    return {words.heartbeat.load(std::memory_order_relaxed),
            words.call_sequence.load(std::memory_order_relaxed),
            words.phase.load(std::memory_order_relaxed),
            words.verdict.load(std::memory_order_relaxed),
            words.leaving.load(std::memory_order_relaxed),
            words.fenced.load(std::memory_order_relaxed),
            words.low_latency_call.load(std::memory_order_relaxed),
            mine_.about(reader).low_latency_told.load(std::memory_order_relaxed)};
}

void Liveness::ring_news() {
    const std::lock_guard lock(mutex_);
    const Own words = own(options_.rank);
    if (words.verdict == rung_.verdict && words.leaving == rung_.leaving && words.fenced == rung_.fenced) return;
    rung_ = words;
    ring_mapped();
}

void Liveness::ring_mapped() const {
    for (const Peer& peer : peers_)
        if (peer.theirs.present()) Doorbell(peer.theirs.doorbell()).ring();
}

}  // namespace expertwire::runtime
