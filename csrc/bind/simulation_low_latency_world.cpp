#include "bind/simulation_low_latency_world.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "engine/pump.hpp"
#include "rows/fp8.hpp"

namespace expertwire::simulation {

using exchange::Kind;
using exchange::RowFormat;
using exchange::Step;

namespace {

constexpr std::uint32_t kRegions = 3;
constexpr std::uint64_t kStepsMax = 1'000'000;
constexpr std::uint32_t kLanesMax = 3;
constexpr std::uint64_t kGuardBytes = 64;
constexpr std::byte kGuard{0x5A};
constexpr std::uint32_t kSweepsMax = 100;

Bytes guarded(std::uint64_t bytes) {
    return Bytes(bytes + kGuardBytes, kGuard);
}

bool guard_stands(const Bytes& bytes) {
    return std::all_of(bytes.end() - kGuardBytes, bytes.end(), [](std::byte b) { return b == kGuard; });
}

}  // namespace

LowLatencyWorld::LowLatencyWorld(std::uint64_t seed, Coverage& coverage, const Options& options)
    : random_(seed),
      coverage_(coverage),
      options_(options),
      script_(make_low_latency_script(random_, coverage)),
      nodes_(script_.node_of),
      patience_(~seed) {
    NetworkModel model;
    model.latency_ns = random_.between(100, 10'000);
    model.bytes_per_ns = 0.1 + static_cast<double>(random_.below(100)) / 10;
    model.transmit_queue = static_cast<std::uint32_t>(random_.between(2, 64));
    if (random_.chance(0.3)) model.rendezvous_bytes = random_.below(512);
    if (seed % 4 == 2 &&
        options.fail_at == 0) {  // class A: a signal leaves behind its rows at once, so that not all can be withheld
        model.ordering = policy_.ordering = OrderingClass::ordered;
        model.rendezvous_bytes = ~std::uint64_t{0};
    }
    const auto is_apart = [](const auto& pairs) { return std::count(pairs.begin(), pairs.end(), 1) > 0; };
    const bool apart = std::any_of(script_.apart.begin(), script_.apart.end(), is_apart);
    impatient_ = seed % 4 > 1 && !apart;
    for (LowLatencyStep& step : script_.steps) {  // not all would hear of it
        step.disagree = step.disagree && !impatient_ && !apart;
    }
    coverage_["ordered"] += policy_.ordering == OrderingClass::ordered;
    if (random_.chance(0.3)) first_epoch_ = (std::uint64_t{1} << 32) - random_.between(1, 4);
    coverage_["epochs_across_2_32"] += first_epoch_ > 0;
    build(model, choose_faults());
}

NetworkFaults LowLatencyWorld::choose_faults() {
    NetworkFaults faults;
    static constexpr double steps[] = {1, 1. / 3, 1. / 9};
    const auto maybe = [&](double most) {
        return random_.chance(0.5) ? most * steps[random_.below(std::size(steps))] : 0.0;
    };
    faults.again = maybe(0.3);
    faults.late_delivery = maybe(0.5);
    faults.late_completion = maybe(0.5);
    faults.early_local = maybe(0.5);
    faults.duplicate = maybe(0.2);
    faults.wrong_generation = maybe(0.2);
    puts_may_fail_ = random_.chance(0.1);
    // Where order is promised a write that fails takes the connection, and so what is behind it, with it.
    if (policy_.ordering == OrderingClass::ordered) puts_may_fail_ = false;
    if (puts_may_fail_) faults.failed_operation = 0.04;
    if (options_.fail_at == 0) return faults;
    puts_may_fail_ = options_.fail_how != NthFault::again;
    NetworkFaults only;
    only.fail_at = options_.fail_at;
    only.fail_how = options_.fail_how;
    return only;
}

void LowLatencyWorld::build(const NetworkModel& model, const NetworkFaults& faults) {
    network_ = std::make_unique<SimulatedNetwork>(nodes_.ranks(), model, faults, random_.next());
    network_->keep_trace(options_.trace_lines);
    members_.resize(nodes_.ranks());
    verdicts_.resize(script_.steps.size());
    const auto lanes = static_cast<std::uint32_t>(random_.between(1, kLanesMax));
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) build_member(rank);
    network_->connect_all(kRegions);
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
        for (std::uint32_t other = 0; other < ranks(); ++other) {
            Member& peer = members_[other];
            if (nodes_.node_of(other) == nodes_.node_of(rank)) {
                members_[rank].port->map(other, {peer.control.data(), nullptr, peer.data.data()});
            } else {
                members_[rank].port->open_lanes(other, lanes);
            }
        }
        members_[rank].exchange->start_after(first_epoch_);
    }
}

void LowLatencyWorld::build_member(std::uint32_t rank) {
    Member& member = members_[rank];
    const exchange::LowLatencyShape shape{rank, nodes_, script_.local_experts_max};
    const exchange::LowLatencyLayout layout(nodes_.ranks(), script_.local_experts_max);
    member.control.resize(layout.control_bytes());
    member.staging.resize(64);
    member.data.resize(script_.data_bytes);
    for (std::byte& byte : member.data) byte = static_cast<std::byte>(random_.next());
    Bytes* const regions[kRegions] = {&member.control, &member.staging, &member.data};
    for (std::uint32_t region = 0; region < kRegions; ++region) {
        RegionSpec spec;
        spec.bytes = regions[region]->size();
        regions[region]->resize(spec.bytes + kGuardBytes, kGuard);
        spec.address = regions[region]->data();
        network_->provider(rank).register_region(RegionId{region}, spec);
    }
    EngineLimits limits;
    limits.hard_timeout_ns = 1'000'000'000;
    limits.peers_max = nodes_.ranks();
    limits.queue_pairs_max = kLanesMax * nodes_.ranks();
    limits.queue_pairs_per_peer_max = kLanesMax;
    limits.outstanding_max = static_cast<std::uint32_t>(random_.between(4, 64));
    limits.requests_max = static_cast<std::uint32_t>(random_.between(4, 128));
    limits.queued_max = static_cast<std::uint32_t>(random_.between(32, 128));
    member.engine = std::make_unique<Engine>(limits, policy_);
    member.port = std::make_unique<SimulatedPort>(rank, nodes_.ranks(), *member.engine, *network_, random_);
    // Map my own memory first: start_after() writes there.
    member.exchange = std::make_unique<exchange::LowLatency>(shape, *member.port, script_.data_bytes);
    member.calls.resize(script_.steps.size());
}

// ---- deeds

bool LowLatencyWorld::begin_dispatch(std::uint32_t rank, std::size_t at, exchange::Refusal& refusal) {
    Member& member = members_[rank];
    Call& call = member.calls[at];
    const LowLatencyStep& step = script_.steps[at];
    const LowLatencyPart& part = step.ranks[rank];
    exchange::LowLatencyDispatchRequest request;
    request.call = step.call;
    if (step.disagree && step.disagreeing == rank) ++request.call.tokens_max;
    const std::uint64_t owned = step.call.owned(rank);
    const std::uint64_t capacity = ranks() * request.call.tokens_max;
    call.x = part.x;
    call.ids.resize(part.ids.size() * step.index_bytes);
    for (std::size_t slot = 0; slot < part.ids.size(); ++slot) {
        std::memcpy(call.ids.data() + slot * step.index_bytes, &part.ids[slot], step.index_bytes);
    }
    call.out = guarded(owned * capacity * step.call.row_bytes());
    call.scales = guarded(owned * capacity * 4 * step.call.scale_words());
    call.src_info = guarded(owned * capacity * 4);
    call.counts.assign(owned, -1);
    call.layout_range.assign(owned * ranks(), -1);
    call.statistics.assign(owned, 1000);
    call.wait_ns.assign(ranks(), 0);
    request.x = call.x.data();
    request.tokens = part.tokens;
    request.topk_idx = call.ids.data();
    request.index_bytes = step.index_bytes;
    request.out = call.out.data();
    request.scales = reinterpret_cast<std::uint32_t*>(call.scales.data());
    request.counts = call.counts.data();
    request.src_info = reinterpret_cast<std::int32_t*>(call.src_info.data());
    request.layout_range = call.layout_range.data();
    request.statistics = call.statistics.data();
    request.wait_ns = call.wait_ns.data();
    call.operation = member.exchange->dispatch(request, call.handle, refusal);
    return true;
}

// False: the combine buffer is still in use, try again.
bool LowLatencyWorld::begin_combine(std::uint32_t rank, std::size_t at, exchange::Refusal& refusal) {
    Member& member = members_[rank];
    Call& call = member.calls[at];
    const LowLatencyStep& step = script_.steps[at];
    const Call& dispatch = member.calls[step.dispatch];
    const LowLatencyPart& part = script_.steps[step.dispatch].ranks[rank];
    const std::uint64_t hidden = step.call.hidden;
    const std::uint64_t capacity = ranks() * step.call.tokens_max;
    exchange::LowLatencyCombineRequest request;
    std::byte* x = nullptr;
    if ((rank + at) % 2 == 0) {
        bool waiting = false;
        exchange::Refusal none;
        const auto buffer = member.exchange->combine_buffer(*dispatch.handle, waiting, none);
        if (waiting) return false;
        if (buffer) x = member.data.data() + *buffer;
        request.zero_copy = buffer.has_value();
        coverage_["zero_copy"] += buffer.has_value();
    }
    if (x == nullptr) {
        call.x.assign(step.call.owned(rank) * capacity * hidden * 2, kGuard);
        x = call.x.data();
    }
    const auto rows = expected_rows(script_, step.dispatch, rank);
    for (std::uint64_t expert = 0; expert < rows.size(); ++expert) {
        for (std::uint64_t row = 0; row < rows[expert].size(); ++row) {
            for (std::uint64_t column = 0; column < hidden; ++column) {
                const std::uint16_t bits = expert_value(at, rank, expert, row, column);
                std::memcpy(x + ((expert * capacity + row) * hidden + column) * 2, &bits, sizeof bits);
            }
        }
    }
    call.out = guarded(part.tokens * hidden * 2);
    call.wait_ns.assign(ranks(), 0);
    request.x = call.x.data();
    request.topk_idx = dispatch.ids.data();
    request.index_bytes = script_.steps[step.dispatch].index_bytes;
    request.weights = part.weights.data();
    request.tokens = part.tokens;
    request.topk = step.call.topk;
    request.hidden = hidden;
    request.handle = dispatch.handle;
    request.out = call.out.data();
    request.wait_ns = call.wait_ns.data();
    call.operation = member.exchange->combine(request, refusal);
    return true;
}

// Its caller tries again: what was packed is told meanwhile, and what has left is let go.
bool LowLatencyWorld::not_yet(std::uint32_t rank) {
    std::uint32_t failed = 0;
    Status status = Status::ok;
    members_[rank].exchange->settle(failed, status);
    members_[rank].gave_up = members_[rank].gave_up || status != Status::ok;
    if (status != Status::ok && !puts_may_fail_) fail(rank, "rows could not be delivered");
    return false;
}

bool LowLatencyWorld::begin(std::uint32_t rank, std::size_t at) {
    exchange::Refusal refusal;
    const bool combine = script_.steps[at].kind == Kind::combine;
    if (!may_begin(rank)) return not_yet(rank);
    if (!(combine ? begin_combine(rank, at, refusal) : begin_dispatch(rank, at, refusal))) return false;
    if (!members_[rank].calls[at].operation) {
        const bool moved = refusal.text.find("may still write") != std::string::npos;
        const bool lost = refusal.text.find("may have written over") != std::string::npos;
        coverage_["refused_while_one_may_write"] += moved;
        coverage_["refused_since_one_may_have_written"] += lost;
        if (lost) members_[rank].gave_up = members_[rank].refused = true;  // the others go on without it
        if (!moved && !lost) fail(rank, "refused its arguments: " + refusal.text);
        return not_yet(rank);
    }
    for (const Member& other : members_)
        coverage_["began_while_others_were_behind"] += other.deed < members_[rank].deed;
    return true;
}

bool LowLatencyWorld::step(std::uint32_t rank, std::uint64_t budget) {
    Member& member = members_[rank];
    if (member.deed == script_.deeds[rank].size() || !error_.empty() || member.gave_up) return false;
    const LowLatencyDeed& deed = script_.deeds[rank][member.deed];
    Call& call = member.calls[deed.step];
    ++steps_;
    look_for_late_rows(rank);
    if (deed.deed == Deed::mask || deed.deed == Deed::unmask) {
        if (deed.deed == Deed::unmask && !unmask(rank, deed.other)) return false;
        if (deed.deed == Deed::mask && !member.exchange->masked(deed.other)) {
            member.exchange->mask(deed.other, true);
            spoil(rank, deed.other);
        }
        ++member.deed;
        return true;
    }
    if (!call.operation) return begin(rank, deed.step);
    const Step outcome =
        deed.deed == Deed::send ? call.operation->send(budget) : call.operation->receive(budget, network_->now());
    hash_ = mix64(hash_ ^ (rank * 8 + static_cast<std::uint64_t>(outcome)));
    if (steps_ % 64 == 0) hash_ = mix64(hash_ ^ call.operation->progress().size());
    if (outcome == Step::done && deed.deed == Deed::send) {
        // x may be overwritten now: rows on their way are in memory of the exchange's own.
        std::fill(call.x.begin(), call.x.end(), std::byte{0xEE});
        ++member.deed;
    } else if (outcome == Step::done || outcome == Step::failed) {
        finish(rank, deed.step, outcome);
        ++member.deed;
    }
    return outcome != Step::waiting || hear(rank, call.operation->epoch()) || lose_patience(rank, deed.step);
}

namespace {

std::string wrong_sum(const Bytes& expected, const Bytes& got, std::ptrdiff_t value, std::uint64_t hidden) {
    const auto read = [value](const Bytes& bytes) {
        std::uint16_t bits;
        std::memcpy(&bits, bytes.data() + value * 2, sizeof bits);
        char text[32];
        std::snprintf(text, sizeof text, "%.9g (0x%04x)", static_cast<double>(rows::widen_bf16(bits)), bits);
        return std::string(text);
    };
    const auto at = static_cast<std::uint64_t>(value);
    return "a sum is wrong: token " + std::to_string(at / hidden) + ", column " + std::to_string(at % hidden) + ": " +
           read(got) + " instead of " + read(expected);
}

}  // namespace

void LowLatencyWorld::finish(std::uint32_t rank, std::size_t at, Step outcome) {
    Member& member = members_[rank];
    const Call& call = member.calls[at];
    const LowLatencyStep& step = script_.steps[at];
    const exchange::Failure& failure = call.operation->failure();
    std::string wrong;
    if (outcome == Step::failed && failure.reason == exchange::FailureReason::put && puts_may_fail_) {
        member.gave_up = true;
        ++coverage_["put_failures"];
        return;
    }
    if (outcome == Step::failed) {
        std::string& verdict = verdicts_[at];
        if (verdict.empty()) verdict = failure.text;
        if (!step.disagree || failure.reason != exchange::FailureReason::mismatch) wrong = "failed: " + failure.text;
        if (verdict != failure.text) wrong = "said '" + failure.text + "' where another said '" + verdict + "'";
    } else if (step.disagree) {
        wrong = "succeeded where every rank must say that they disagree";
    } else if (step.kind == Kind::dispatch) {
        wrong = check_dispatch(rank, at);
    } else {
        const Bytes expected = expected_sums(script_, at, rank);
        const auto [want, got] = std::mismatch(expected.begin(), expected.end(), call.out.begin());
        if (want != expected.end())
            wrong = wrong_sum(expected, call.out, (want - expected.begin()) / 2, step.call.hidden);
    }
    if (wrong.empty()) wrong = check_guards(rank);
    for (const Bytes* bytes : {&call.out, &call.scales, &call.src_info}) {
        if (wrong.empty() && !bytes->empty() && !guard_stands(*bytes)) wrong = "wrote behind an output";
    }
    if (!wrong.empty()) fail(rank, wrong);
    hash_ = mix64(hash_ ^ (rank * 1'000'003 + at));
    ++coverage_["hooks"];
    coverage_["hooks_before_own_rows_left"] += member.exchange->consumed() < call.operation->epoch();
}

// ---- oracle

std::string LowLatencyWorld::check_rows(std::uint32_t rank, std::size_t at, std::uint64_t expert,
                                        const std::vector<LowLatencyRow>& rows) const {
    const Call& call = members_[rank].calls[at];
    const exchange::LowLatencyCall& shape = script_.steps[at].call;
    const std::uint64_t capacity = ranks() * shape.tokens_max;
    const std::uint64_t words = shape.scale_words();
    const std::size_t blocks = rows::scale_blocks(shape.hidden);
    for (std::uint64_t row = 0; row < rows.size(); ++row) {
        std::int32_t token;
        std::memcpy(&token, call.src_info.data() + (expert * capacity + row) * 4, sizeof token);
        if (token != static_cast<std::int32_t>(rows[row].token)) {
            return "src_info of row " + std::to_string(row) + " from rank " + std::to_string(rows[row].source) +
                   " is " + std::to_string(token) + " instead of " + std::to_string(rows[row].token);
        }
        const std::byte* const x =
            script_.steps[at].ranks[rows[row].source].x.data() + rows[row].token * shape.hidden * 2;
        Bytes want(x, x + shape.hidden * 2);
        std::vector<std::uint32_t> want_words(words);
        if (words > 0) {
            std::vector<float> scales(blocks);
            const bool exact = shape.format == RowFormat::fp8;
            want.resize(shape.hidden);
            rows::quantise(want.data(), scales.data(), x, shape.hidden,
                           exact ? rows::ScaleKind::exact : rows::ScaleKind::power_of_two);
            std::memcpy(want_words.data(), scales.data(), 4 * std::min<std::size_t>(blocks, words));
            if (shape.format == RowFormat::fp8_ue8m0) rows::pack_ue8m0(want_words.data(), scales.data(), blocks);
        }
        const std::byte* const got = call.out.data() + (expert * capacity + row) * shape.row_bytes();
        if (!std::equal(want.begin(), want.end(), got)) return "a row is wrong";
        for (std::uint64_t word = 0; word < words; ++word) {
            std::uint32_t value;
            std::memcpy(&value, call.scales.data() + ((expert * words + word) * capacity + row) * 4, sizeof value);
            if (value != want_words[word]) return "a scale is wrong";
        }
    }
    return {};
}

std::string LowLatencyWorld::check_dispatch(std::uint32_t rank, std::size_t at) const {
    const Call& call = members_[rank].calls[at];
    const auto expected = expected_rows(script_, at, rank);
    for (std::uint64_t expert = 0; expert < expected.size(); ++expert) {
        const std::string where = "local expert " + std::to_string(expert) + ": ";
        const auto count = static_cast<std::int32_t>(expected[expert].size());
        if (call.counts[expert] != count) return where + "the count is wrong";
        if (call.statistics[expert] != 1000 + count) return where + "the statistics are wrong";
        std::int64_t begin = 0;
        for (std::uint32_t source = 0; source < ranks(); ++source) {
            const auto here = std::count_if(expected[expert].begin(), expected[expert].end(),
                                            [&](const LowLatencyRow& row) { return row.source == source; });
            if (call.layout_range[expert * ranks() + source] != (begin << 32 | here)) {
                return where + "layout_range is wrong";
            }
            begin += here;
        }
        const std::string wrong = check_rows(rank, at, expert, expected[expert]);
        if (!wrong.empty()) return where + wrong;
    }
    return {};
}

std::string LowLatencyWorld::check_guards(std::uint32_t rank) const {
    for (const Bytes* region : {&members_[rank].control, &members_[rank].data}) {
        if (!guard_stands(*region)) return "a byte behind its control or data region was overwritten";
    }
    return {};
}

// ---- running

bool LowLatencyWorld::turn(std::uint32_t rank) {
    Member& member = members_[rank];
    const bool moved = pump(*member.engine, network_->provider(rank), member.arrivals, network_->now()).moved();
    member.port->reap();
    return moved;
}

bool LowLatencyWorld::sweep() {
    bool moved = false;
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
        moved = step(rank, 1 << 20) || moved;
        moved = turn(rank) || moved;
    }
    return network_->run_next() || moved;
}

bool LowLatencyWorld::all_ended() const {
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
        if (members_[rank].deed < script_.deeds[rank].size() && !members_[rank].gave_up) return false;
    }
    return true;
}

Result LowLatencyWorld::run() {
    std::uint32_t idle = 0;
    while (error_.empty() && !all_ended()) {
        const auto rank = static_cast<std::uint32_t>(random_.below(ranks()));
        const std::uint64_t choice = random_.below(10);
        bool moved = false;
        if (choice < 5) {
            moved = step(rank, random_.chance(0.3) ? 1 : random_.between(1, 5'000));
        } else {
            moved = choice < 8 ? turn(rank) : network_->run_next();
        }
        idle = moved ? 0 : idle + 1;
        if (idle > 20 && sweep()) idle = 0;
        if (idle > 20 + kSweepsMax && deadline()) {
            idle = 0;
        } else if (idle > 20 + kSweepsMax) {
            if (all_ended() || !error_.empty() || puts_may_fail_) break;
            fail(0, "nothing moves any more");
        }
        if (steps_ > kStepsMax) fail(rank, "does not end");
    }
    for (const Member& member : members_) {
        coverage_["puts"] += member.port->puts();
        coverage_["submissions_pushed_back"] += member.port->pushed_back();
        const std::string broken = member.engine->check_invariants();
        if (!broken.empty() && error_.empty()) error_ = "engine: " + broken;
    }
    Result result;
    result.error = error_;
    result.trace_hash = mix64(hash_ ^ network_->trace_hash());
    result.steps = steps_;
    result.posts = network_->posts();
    result.trace = network_->trace_text();
    return result;
}

void LowLatencyWorld::fail(std::uint32_t rank, const std::string& text) {
    if (!error_.empty()) return;
    error_ = "rank " + std::to_string(rank) + ": " + text;
    for (std::uint32_t other = 0; other < ranks(); ++other) {
        const Member& member = members_[other];
        if (member.deed == script_.deeds[other].size()) continue;
        const LowLatencyDeed& deed = script_.deeds[other][member.deed];
        error_ += "\n  rank " + std::to_string(other) + " at deed " + std::to_string(static_cast<int>(deed.deed)) +
                  " of step " + std::to_string(deed.step);
        const auto& operation = member.calls[deed.step].operation;
        if (!operation) continue;
        error_ += std::string(" (") + operation->stage_name() + ")";
        for (const exchange::LowLatencyPeer& peer : operation->progress()) {
            if (!peer.missing.empty()) error_ += "; rank " + std::to_string(peer.rank) + ": " + peer.missing;
        }
    }
}

Result simulate_low_latency(std::uint64_t seed, const Options& options, Coverage& coverage) {
#ifdef EXPERTWIRE_MUTANTS
    active_mutant = options.mutant;
#endif
    LowLatencyWorld world(seed, coverage, options);
    Result result = world.run();
#ifdef EXPERTWIRE_MUTANTS
    active_mutant = Mutant::none;
#endif
    return result;
}

}  // namespace expertwire::simulation
