#include "provider/simulated_oracle.hpp"

#include <algorithm>
#include <cstring>

namespace expertwire {

std::byte payload_byte(std::uint64_t seed, std::uint64_t offset) {
    const std::uint64_t word = mix64(seed + (offset / 8 + 1) * 0x9e3779b97f4a7c15ull);
    return static_cast<std::byte>(word >> (offset % 8 * 8));
}

EngineOracle::EngineOracle(SimulatedNetwork& network, std::uint64_t seed)
    : network_(network), seed_(seed), memory_(network.ranks()), jobs_(std::size_t{network.ranks()} * jobs_per_rank) {
    const std::uint64_t pieces = std::uint64_t{jobs_per_rank} * chunks_max * chunk_bytes_max;
    const std::array<std::uint64_t, regions> bytes{
        pieces, pieces * network.ranks(), std::uint64_t{network.ranks()} * jobs_per_rank * 8, pieces, pieces, 64};
    for (std::uint32_t rank = 0; rank < network.ranks(); ++rank) {
        for (std::uint32_t region = 0; region < regions; ++region) {
            memory_[rank][region].resize(bytes[region]);
            RegionSpec spec;
            spec.address = memory_[rank][region].data();
            spec.bytes = bytes[region];
            network.provider(rank).register_region(RegionId{region}, spec);
        }
        for (std::uint64_t i = 0; i < pieces; ++i) memory_[rank][library][i] = payload_byte(seed_ + rank, i);
    }
    network.connect_all(regions);
    shadow_ = memory_;
    network.on_landing = [this](const SimulatedNetwork::Landing& landing) { on_landing(landing); };
    network.on_failure = [this](const SimulatedNetwork::Landing& landing) { on_torn(landing); };
}

// ---- memory as it has to be

void EngineOracle::expect(std::uint32_t rank, std::uint32_t region, std::uint64_t offset, const std::byte* bytes,
                          std::uint64_t count) {
    std::copy(bytes, bytes + count, shadow_[rank][region].begin() + static_cast<std::ptrdiff_t>(offset));
}

// The piece at `offset` and its neighbours, at once: a stray byte most likely lies there.
void EngineOracle::check_around(std::uint32_t rank, std::uint32_t region, std::uint64_t offset) {
    const std::vector<std::byte>& is = memory_[rank][region];
    const std::uint64_t begin = offset < chunk_bytes_max ? 0 : offset - chunk_bytes_max;
    const std::uint64_t end = std::min<std::uint64_t>(is.size(), offset + 2 * chunk_bytes_max);
    if (std::memcmp(is.data() + begin, shadow_[rank][region].data() + begin, end - begin) != 0) check_memory();
}

void EngineOracle::check_memory() {
    static constexpr std::array<const char*, regions> names{"outbox", "inbox", "words", "library", "reads", "fragile"};
    for (std::uint32_t rank = 0; rank < memory_.size(); ++rank) {
        for (std::uint32_t region = 0; region < regions; ++region) {
            const std::vector<std::byte>& is = memory_[rank][region];
            const std::vector<std::byte>& must = shadow_[rank][region];
            if (std::memcmp(is.data(), must.data(), is.size()) == 0) continue;
            const auto at = std::mismatch(is.begin(), is.end(), must.begin()).first - is.begin();
            return fail(
                "byte " + std::to_string(at) + " of " + names[region] + " was changed by nothing that was asked for",
                rank, 0);
        }
    }
}

void EngineOracle::on_torn(const SimulatedNetwork::Landing& landing) {
    const PostCommand& command = landing.command;
    if (command.kind != OpKind::write) return;
    const bool ordered = network_.provider(0).capabilities().ordering == OrderingClass::ordered;
    const auto [place, first, end] = pieces_of(command);
    for (std::uint32_t c = first; c < end; ++c) {
        const Chunk& chunk = job(landing.source, place).chunks[c];
        const std::uint64_t at = inbox_piece(landing.source, place, c);
        if (!chunk.hopeless) expect(landing.target, inbox, at, memory(landing.target, inbox, at), chunk.bytes);
        // Where order alone is promised (class A), a signal follows its payload at once: that the payload then fails at
        // the target nobody can know in time.
        if (ordered) facts_[chunk.fact] = excused;
    }
    for (std::uint32_t c = first; c < end; ++c)
        if (!job(landing.source, place).chunks[c].hopeless)
            check_around(landing.target, inbox, inbox_piece(landing.source, place, c));
}

EngineOracle::Pieces EngineOracle::pieces_of(const PostCommand& command) {
    const auto first = static_cast<std::uint32_t>(command.local_offset / chunk_bytes_max);
    const auto end = static_cast<std::uint32_t>((command.local_offset + command.bytes - 1) / chunk_bytes_max) + 1;
    const std::uint32_t place = first / chunks_max;
    return {place, first - place * chunks_max, std::min(end - place * chunks_max, chunks_max)};
}

void EngineOracle::fail(const std::string& what, std::uint32_t rank, std::uint32_t place) {
    if (!failure_.empty()) return;  // the first one is the cause
    failure_ = what + " (rank " + std::to_string(rank) + ", job " + std::to_string(place) + ", t " +
               std::to_string(network_.now()) + " ns)";
}

std::uint64_t EngineOracle::payload_seed(std::uint32_t rank, std::uint32_t place, std::uint32_t chunk,
                                         std::uint64_t epoch) const {
    return mix64(mix64(seed_ + rank * 1000003ull + place) + epoch * 31 + chunk);
}

bool EngineOracle::matches(const std::byte* at, std::uint64_t seed, std::uint64_t bytes) const {
    for (std::uint64_t i = 0; i < bytes; ++i) {
        if (at[i] != payload_byte(seed, i)) return false;
    }
    return true;
}

void EngineOracle::prepare(std::uint32_t rank, std::uint32_t place) {
    Job& it = job(rank, place);
    ++it.epoch;
    it.covers.clear();
    it.cancelled = it.flying = false;
    for (std::uint32_t c = 0; c < it.chunk_count; ++c) {
        it.chunks[c].fact = new_fact();
        std::byte* source = memory(rank, outbox, piece(place, c));
        const std::uint64_t seed = payload_seed(rank, place, c, it.epoch);
        for (std::uint64_t i = 0; i < it.chunks[c].bytes; ++i) source[i] = payload_byte(seed, i);
        expect(rank, outbox, piece(place, c), source, it.chunks[c].bytes);
    }
    if (!it.has_control) return;
    it.control_fact = new_fact();
    it.note = {rank, place, it.epoch};
    for (std::uint32_t c = 0; c < it.chunk_count; ++c) {
        const bool covered = it.scope != Scope::queue_pair || it.chunks[c].lane == it.control_lane;
        if (covered) it.covers.push_back(it.chunks[c].fact);
    }
}

void EngineOracle::cover(std::uint32_t rank, std::uint32_t place, const Engine& engine) {
    Job& it = job(rank, place);
    if (!it.has_control || it.scope == Scope::request) return;
    for (std::uint32_t other = 0; other < jobs_per_rank; ++other) {
        const Job& before = job(rank, other);
        if (!before.active || before.peer != it.peer) continue;
        const RecordView record = RecordView::unpack(engine.record(before.ticket).load(std::memory_order_acquire));
        if (record.is_terminal() || record.first_error != Status::ok) continue;
        const auto same = [&](std::uint32_t lane) { return it.scope == Scope::peer || lane == it.control_lane; };
        for (std::uint32_t c = 0; c < before.chunk_count; ++c) {
            if (same(before.chunks[c].lane)) it.covers.push_back(before.chunks[c].fact);
        }
        if (before.has_control && same(before.control_lane)) it.covers.push_back(before.control_fact);
    }
}

void EngineOracle::start(std::uint32_t rank, std::uint32_t place, Ticket ticket) {
    job(rank, place).active = true;
    job(rank, place).ticket = ticket;
}

void EngineOracle::cancelled(std::uint32_t rank, std::uint32_t place) {
    Job& it = job(rank, place);
    it.cancelled = true;
    for (std::uint32_t c = 0; c < it.chunk_count; ++c) facts_[it.chunks[c].fact] = excused;
    if (it.has_control) facts_[it.control_fact] = excused;
}

// ---- what the network did

void EngineOracle::on_landing(const SimulatedNetwork::Landing& landing) {
    ++landings_;
    const PostCommand& command = landing.command;
    if (command.kind == OpKind::write) on_write(landing);
    if (command.kind == OpKind::read) on_read(landing);
    if (command.kind == OpKind::signal) {
        const auto place = static_cast<std::uint32_t>(command.remote_offset / 8 % jobs_per_rank);
        const std::uint64_t at = word(landing.source, place);
        std::uint64_t value = 0;
        std::memcpy(&value, shadow_[landing.target][words].data() + at, sizeof value);
        value += job(landing.source, place).epoch;
        expect(landing.target, words, at, reinterpret_cast<const std::byte*>(&value), sizeof value);
        check_around(landing.target, words, at);
        on_control(landing.source, place, command.operand);
    }
    if (command.kind == OpKind::notification) {
        std::array<std::uint64_t, 3> note{};
        std::memcpy(note.data(), command.payload, sizeof note);  // still the user's: the request is not terminal
        on_control(landing.source, static_cast<std::uint32_t>(note[1]), note[2]);
    }
}

void EngineOracle::on_write(const SimulatedNetwork::Landing& landing) {
    const PostCommand& command = landing.command;
    if (command.remote == remote(landing.target, fragile))
        return fail("a write landed in a closed region", landing.source, 0);
    const auto [place, first, end] = pieces_of(command);
    Job& it = job(landing.source, place);
    if (!it.active && !it.flying) return fail("a write landed after its request was terminal", landing.source, place);
    for (std::uint32_t c = first; c < end; ++c) {
        if (facts_[it.chunks[c].fact] != 0) return fail("a write landed twice", landing.source, place);
        facts_[it.chunks[c].fact] = 1;
        const std::byte* at = memory(landing.target, inbox, inbox_piece(landing.source, place, c));
        if (!matches(at, payload_seed(landing.source, place, c, it.epoch), it.chunks[c].bytes)) {
            fail("a write landed with bytes of another epoch: its source was reused too early", landing.source, place);
        }
        expect(landing.target, inbox, inbox_piece(landing.source, place, c), at, it.chunks[c].bytes);
    }
    for (std::uint32_t c = first; c < end; ++c)
        check_around(landing.target, inbox, inbox_piece(landing.source, place, c));
}

void EngineOracle::on_read(const SimulatedNetwork::Landing& landing) {
    const auto [place, first, end] = pieces_of(landing.command);
    Job& it = job(landing.source, place);
    if (!it.active) return fail("a read landed after its request was terminal", landing.source, place);
    for (std::uint32_t c = first; c < end; ++c) {
        facts_[it.chunks[c].fact] = 1;
        const std::uint64_t at = piece(place, c);
        expect(landing.source, reads, at, shadow_[landing.target][library].data() + at, it.chunks[c].bytes);
    }
    for (std::uint32_t c = first; c < end; ++c) check_around(landing.source, reads, piece(place, c));
}

void EngineOracle::on_control(std::uint32_t rank, std::uint32_t place, std::uint64_t epoch) {
    Job& it = job(rank, place);
    ++controls_checked_;
    if (!it.active || it.epoch != epoch) return fail("a signal landed after its request was terminal", rank, place);
    if (facts_[it.control_fact] != 0) return fail("a signal landed twice", rank, place);
    facts_[it.control_fact] = 1;
    for (const std::uint32_t fact : it.covers) {
        if (facts_[fact] == 0) return fail("a signal overtook what it covers", rank, place);
    }
    for (std::uint32_t c = 0; c < it.chunk_count; ++c) {
        if (it.chunks[c].kind != OpKind::write || facts_[it.chunks[c].fact] != 1) continue;
        const std::byte* at = memory(it.peer, inbox, inbox_piece(rank, place, c));
        if (!matches(at, payload_seed(rank, place, c, epoch), it.chunks[c].bytes)) {
            return fail("a signal landed over bytes of another epoch", rank, place);
        }
    }
}

void EngineOracle::check_notification(std::uint32_t at, const Arrival& arrival) {
    std::array<std::uint64_t, 3> note{};
    if (arrival.payload.size() != sizeof note) return fail("a notification arrived torn", at, 0);
    std::memcpy(note.data(), arrival.payload.data(), sizeof note);
    if (note[0] != arrival.peer.value) fail("a notification names another sender", at, 0);
}

// ---- what a terminal record means

bool EngineOracle::untouched(std::uint32_t rank, std::uint32_t place) {
    const std::uint64_t bytes = std::uint64_t{chunks_max} * chunk_bytes_max;
    return network_.touching(rank, RegionId{outbox}, piece(place, 0), bytes) == 0 &&
           network_.touching(rank, RegionId{reads}, piece(place, 0), bytes) == 0;
}

bool EngineOracle::over(std::uint32_t rank, std::uint32_t place) {
    const Job& it = job(rank, place);
    const std::uint64_t bytes = std::uint64_t{chunks_max} * chunk_bytes_max;
    return untouched(rank, place) &&
           network_.flying(rank, remote(it.peer, inbox), inbox_piece(rank, place, 0), bytes) == 0 &&
           network_.flying(rank, remote(it.peer, words), word(rank, place), 8) == 0;
}

bool EngineOracle::check_end(std::uint32_t rank, std::uint32_t place, Engine& engine, Status& status) {
    Job& it = job(rank, place);
    if (it.flying && over(rank, place)) it.flying = false;
    if (!it.active) return false;
    status = engine.status(it.ticket);
    if (status == Status::pending) return false;
    if (status == Status::stale) fail("the record of a live request is of another generation", rank, place);
    if (status == Status::cancelled && !it.cancelled) fail("cancelled without having been asked to", rank, place);
    if (!untouched(rank, place)) fail("terminal while its local memory is still in use", rank, place);
    const bool early = it.level == Level::local && status == Status::ok;
    if (!early && !over(rank, place)) fail("terminal while something it owns is in flight", rank, place);
    if (status == Status::ok) {
        check_success(rank, place);
    } else if (!errors_possible && status != Status::cancelled) {
        fail("failed without a cause: status " + std::to_string(static_cast<int>(status)), rank, place);
    }
    if (engine.release(it.ticket) != Status::ok) fail("a terminal request could not be released", rank, place);
    if (engine.status(it.ticket) != Status::stale) fail("a released ticket is not stale", rank, place);
    it.active = false;
    it.flying = !over(rank, place);
    scribble(rank, place);
    return true;
}

void EngineOracle::check_success(std::uint32_t rank, std::uint32_t place) {
    const Job& it = job(rank, place);
    for (std::uint32_t c = 0; c < it.chunk_count; ++c) {
        const Chunk& chunk = it.chunks[c];
        if (chunk.hopeless) return fail("success, although one of its chunks cannot have arrived", rank, place);
        if (chunk.kind == OpKind::read) {
            const std::uint64_t from = piece(place, c);
            for (std::uint64_t i = 0; i < chunk.bytes; ++i) {
                if (*memory(rank, reads, from + i) != payload_byte(seed_ + it.peer, from + i)) {
                    return fail("a read succeeded with wrong bytes", rank, place);
                }
            }
        } else if (it.level == Level::delivered && facts_[chunk.fact] == 0) {
            return fail("success before a chunk was delivered", rank, place);
        }
    }
    if (it.has_control && facts_[it.control_fact] == 0) fail("success before its signal was delivered", rank, place);
}

// The user's next use of the memory begins with other bytes, at once.
void EngineOracle::scribble(std::uint32_t rank, std::uint32_t place) {
    const std::size_t bytes = std::size_t{chunks_max} * chunk_bytes_max;
    std::memset(memory(rank, outbox, piece(place, 0)), 0xee, bytes);
    std::memset(memory(rank, reads, piece(place, 0)), 0xee, bytes);
    for (const std::uint32_t region : {std::uint32_t{outbox}, std::uint32_t{reads}}) {
        expect(rank, region, piece(place, 0), memory(rank, region, piece(place, 0)), bytes);
    }
}

}  // namespace expertwire
