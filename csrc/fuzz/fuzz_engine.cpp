// Any sequence of what a runtime and a provider may do to the engine, and of completions that no sane provider gives.
// After each step every rule of DESIGN "What must always hold" is checked; at the end all is healed, and must end.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "fuzz/bytes.hpp"

namespace expertwire::fuzz {
namespace {

constexpr std::uint32_t peers = 3, lanes = 2, slots_max = 16, requests_max = 8;
constexpr TimeNs hard_ns = 1000;

[[noreturn]] void fail(const std::string& why) {
    std::fprintf(stderr, "fuzz_engine: %s\n", why.c_str());
    std::abort();
}

class Driver {
  public:
    explicit Driver(Bytes& bytes) : bytes_(bytes), engine_(limits(bytes), policy(bytes)) {
        lanes_.resize(peers);
        for (std::uint32_t peer = 0; peer < peers; ++peer) open(peer);
    }

    void run() {
        while (!bytes_.empty()) {
            step();
            check();
        }
        converge();
    }

  private:
    static EngineLimits limits(Bytes& bytes) {
        EngineLimits made;
        made.peers_max = peers;
        made.queue_pairs_max = peers * lanes;
        made.queue_pairs_per_peer_max = lanes;
        made.outstanding_max = 1 + bytes.below(slots_max / 2);
        made.requests_max = requests_max;
        made.queued_max = 4 + bytes.below(16);
        made.held_max = 1 + bytes.below(6);
        made.regions_max = 2;
        made.hard_timeout_ns = hard_ns;
        made.first_generation = bytes.below(2) == 0 ? 1 : ~std::uint32_t{0};
        return made;
    }
    static GatePolicy policy(Bytes& bytes) {
        GatePolicy made;
        if (bytes.below(3) == 0) made.ordering = OrderingClass::ordered;
        if (bytes.below(3) == 0) made.ordered_bytes_max = 64;
        return made;
    }

    void open(std::uint32_t peer) {
        lanes_[peer].clear();
        for (std::uint32_t lane = 0; lane < lanes; ++lane) {
            const QueuePairId id = engine_.open_queue_pair(PeerId{peer}, EndpointId{endpoint_});
            if (id.valid()) lanes_[peer].push_back(id);
        }
    }
    QueuePairId lane(std::uint32_t peer) {
        return lanes_[peer].empty() ? QueuePairId{} : lanes_[peer][bytes_.below(lanes) % lanes_[peer].size()];
    }

    void submit() {
        const std::uint32_t peer = bytes_.below(peers);
        std::vector<ChunkSpec> chunks(bytes_.below(4));
        for (ChunkSpec& chunk : chunks) {
            chunk.queue_pair = lane(peer);
            chunk.kind = bytes_.below(4) == 0 ? OpKind::read : OpKind::write;
            chunk.local = RegionId{bytes_.below(3)};  // one of them is beyond the table
            chunk.bytes = bytes_.byte();
        }
        std::vector<ControlSpec> controls(bytes_.below(3));
        for (ControlSpec& control : controls) {
            control.queue_pair = lane(peer);
            control.scope = static_cast<Scope>(bytes_.below(3));
            control.operand = 1;
            if (bytes_.below(4) == 0) {
                control.kind = OpKind::notification;
                control.payload = payload_;
                control.bytes = sizeof(payload_);
            }
        }
        const Level level = bytes_.below(2) == 0 ? Level::delivered : Level::local;
        const Engine::Submitted submitted = engine_.submit(PeerId{peer}, chunks, controls, level, now_);
        if (submitted.status == Status::ok) requests_.push_back(submitted.request);
    }

    void post(bool healthy) {
        std::vector<PostCommand> commands(healthy ? slots_max : 1 + bytes_.below(slots_max));
        const std::size_t count = engine_.take_posts(commands, now_);
        for (std::size_t i = 0; i < count; ++i) {
            if (!engine_.may_post(commands[i])) continue;
            PostResult result;
            const std::uint32_t how = healthy ? 0 : bytes_.below(6);
            if (how == 1) result = {PostOutcome::again, Status::would_block, 0};
            if (how == 2) result = {PostOutcome::failed, static_cast<Status>(bytes_.below(14)), 5};
            engine_.on_posted(commands[i], result, now_);
            if (result.outcome == PostOutcome::posted) flying_.push_back(commands[i].ticket);
        }
    }

    void complete(bool healthy) {
        if (flying_.empty()) return;
        const std::size_t at = healthy ? 0 : bytes_.byte() % flying_.size();
        Completion completion{flying_[at], Status::ok, Level::delivered, 0};
        if (!healthy && bytes_.below(3) == 0) completion.status = static_cast<Status>(bytes_.below(14));
        if (!healthy && bytes_.below(3) == 0) completion.level = Level::local;
        const bool again = !healthy && bytes_.below(4) == 0;  // a provider may say it twice
        if (!again) flying_.erase(flying_.begin() + static_cast<std::ptrdiff_t>(at));
        engine_.on_completion(completion, now_);
    }

    void complete_nonsense() {
        const Ticket ticket{bytes_.byte(), bytes_.below(4) == 0 ? 0 : static_cast<std::uint32_t>(bytes_.byte())};
        engine_.on_completion({ticket, static_cast<Status>(bytes_.below(14)), Level::delivered, -1}, now_);
    }

    void drop_flying_of_closed() {
        // What the close has ended: a late word on it must change nothing, and need not come.
        if (bytes_.below(2) == 0) flying_.clear();
    }

    void replace() {
        const EndpointId old{endpoint_};
        engine_.replace_endpoint(old, EndpointId{++endpoint_});
        if (bytes_.below(2) == 0) return;
        if (bytes_.below(4) != 0 && !engine_.drained(old)) return;
        engine_.on_endpoint_closed(old, now_);
        drop_flying_of_closed();
    }

    void reopen(std::uint32_t peer) {
        engine_.on_peer_closed(PeerId{peer}, now_);
        if (engine_.close_peer(PeerId{peer}, now_) == Status::ok) open(peer);
    }

    void look_at_request() {
        if (requests_.empty()) return;
        const std::size_t at = bytes_.byte() % requests_.size();
        const Ticket request = requests_[at];
        switch (bytes_.below(4)) {
            case 0:
                engine_.cancel(request);
                break;
            case 3:
                engine_.withhold(request);
                break;
            case 1:
                engine_.mark_stalled(request);
                break;
            default:
                if (engine_.release(request) == Status::ok) {
                    if (engine_.status(request) != Status::stale) fail("a released request is not stale");
                    requests_.erase(requests_.begin() + static_cast<std::ptrdiff_t>(at));
                }
        }
    }

    void step() {
        switch (bytes_.below(14)) {
            case 0:
            case 1:
            case 2:
                return submit();
            case 3:
            case 4:
                return post(false);
            case 5:
            case 6:
                return complete(false);
            case 7:
                return complete_nonsense();
            case 8:
                now_ += 8 * TimeNs{bytes_.byte()};
                return engine_.step(now_);
            case 9:
                return look_at_request();
            case 10:
                return engine_.on_peer_error(PeerId{bytes_.below(peers + 1)}, Status::peer_dead, 0, now_);
            case 11:
                if (bytes_.below(4) == 0) engine_.on_endpoint_error(EndpointId{endpoint_}, Status::io_error, 5, now_);
                return;
            case 12:
                return replace();
            default:
                return reopen(bytes_.below(peers));
        }
    }

    void check() const {
        const std::string broken = engine_.check_invariants();
        if (!broken.empty()) fail(broken);
        const EngineStatistics seen = engine_.statistics();
        if (seen.misuses > 0) fail("on_posted() was refused, although each command was given to it in order");
        if (seen.slots_counted > engine_.limits().outstanding_max) fail("more slots count than the cap");
    }

    // The network heals, every peer is closed: every request ends, and nothing is left.
    void converge() {
        const std::uint64_t mark = engine_.quiet_mark();
        for (std::uint32_t round = 0; round < 64 && !engine_.reached(mark); ++round) {
            post(true);
            while (!flying_.empty()) complete(true);
            now_ += hard_ns;
            engine_.step(now_);
            check();
        }
        for (std::uint32_t old = 0; old <= endpoint_; ++old) engine_.on_endpoint_closed(EndpointId{old}, now_);
        for (std::uint32_t peer = 0; peer < peers; ++peer) {
            engine_.on_peer_closed(PeerId{peer}, now_);
            if (engine_.close_peer(PeerId{peer}, now_) != Status::ok) fail("a peer without work cannot be closed");
        }
        check();
        for (const Ticket request : requests_) {
            const Status status = engine_.status(request);
            if (status == Status::pending || status == Status::stale) fail("a request never ended");
            if (engine_.release(request) != Status::ok) fail("an ended request cannot be released");
        }
        if (!engine_.idle()) fail("something is left");
        for (std::uint32_t region = 0; region < 2; ++region)
            if (engine_.region_uses(RegionId{region}) != 0) fail("a region is still in use");
    }

    Bytes& bytes_;
    Engine engine_;
    TimeNs now_ = 1;
    std::uint32_t endpoint_ = 0;
    std::vector<std::vector<QueuePairId>> lanes_;
    std::vector<Ticket> flying_, requests_;
    std::byte payload_[8]{};
};

}  // namespace
}  // namespace expertwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size > 2048) return -1;
    expertwire::fuzz::Bytes bytes(data, size);
    expertwire::fuzz::Driver(bytes).run();
    return 0;
}
