// _simulation: the engine's runs by seed, the kept mutants, and the parts of the engine that unit tests take apart.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bind/simulation_bind.hpp"
#include "engine/engine.hpp"
#include "engine/mutants.hpp"
#include "engine/pump.hpp"
#include "provider/kernel_copies.hpp"
#include "provider/simulated_engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace expertwire {

namespace {

constexpr std::array<const char*, nth_faults> nth_names{"operation", "post", "again", "lost"};
constexpr std::array<const char*, request_states> state_names{"FREE", "QUEUED", "POSTED",   "DRAINING",
                                                              "DONE", "FAILED", "CANCELLED"};
constexpr std::array<const char*, 14> status_names{"ok",        "pending", "would_block",  "cancelled", "aborted",
                                                   "peer_dead", "bad_key", "out_of_range", "timed_out", "refused",
                                                   "invalid",   "stale",   "closed",       "io_error"};

}  // namespace

Mutant mutant_named(const std::string& name) {
    for (const NamedMutant& each : named_mutants)
        if (name == each.name) return each.mutant;
    throw nb::value_error(("'" + name + "' is no mutant; see mutants()").c_str());
}

NthFault nth_named(const std::string& name) {
    for (std::size_t i = 0; i < nth_names.size(); ++i) {
        if (name == nth_names[i]) return static_cast<NthFault>(i);
    }
    throw nb::value_error(("'" + name + "' is not what may become of the n-th operation; see nth_faults()").c_str());
}

NetworkFaults network_faults_of(const nb::dict& options) {
    NetworkFaults faults;
    const auto take = [&](const char* name, auto& into) {
        if (options.contains(name)) into = nb::cast<std::decay_t<decltype(into)>>(options[name]);
    };
    take("again", faults.again);
    take("again_burst_max", faults.again_burst_max);
    take("late_delivery", faults.late_delivery);
    take("late_delivery_max_ns", faults.late_delivery_max_ns);
    take("late_completion", faults.late_completion);
    take("late_completion_max_ns", faults.late_completion_max_ns);
    take("early_local", faults.early_local);
    take("failed_post", faults.failed_post);
    take("failed_operation", faults.failed_operation);
    take("lost_completion", faults.lost_completion);
    take("fail_at", faults.fail_at);
    if (options.contains("fail_how")) faults.fail_how = nth_named(nb::cast<std::string>(options["fail_how"]));
    take("duplicate", faults.duplicate);
    take("wrong_generation", faults.wrong_generation);
    take("null_context", faults.null_context);
    return faults;
}

namespace {

nb::dict to_dict(const EngineSimulationResult& result) {
    nb::dict out, faults, events, transitions;
    for (std::size_t i = 0; i < network_faults; ++i) faults[name_of(static_cast<NetworkFault>(i))] = result.faults[i];
    for (std::size_t i = 0; i < simulation_events; ++i) {
        events[name_of(static_cast<SimulationEvent>(i))] = result.events[i];
    }
    for (std::size_t from = 0; from < request_states; ++from) {
        for (std::size_t to = 0; to < request_states; ++to) {
            if (result.transitions[from][to] == 0) continue;
            const std::string name = std::string(state_names[from]) + "->" + state_names[to];
            transitions[name.c_str()] = result.transitions[from][to];
        }
    }
    out["seed"] = result.seed;
    out["failure"] = result.failure;
    out["trace_hash"] = result.trace_hash;
    out["steps"] = result.steps;
    out["virtual_ns"] = result.virtual_ns;
    out["ranks"] = result.ranks;
    out["queue_pairs_per_peer"] = result.queue_pairs_per_peer;
    out["ordered"] = result.ordered;
    out["requests"] = result.requests;
    out["landings"] = result.landings;
    out["controls"] = result.controls;
    out["posts"] = result.posts;
    out["longest_wait"] = result.longest_wait;
    out["swarm"] = nb::cast(result.swarm);
    out["trace"] = nb::cast(result.trace);
    const CountedCounters& counting = result.counting;
    out["counting"] = nb::make_tuple(counting.immediates, counting.signals_added, counting.signals_waited,
                                     counting.signals_aborted, counting.strays, counting.dropped);
    out["scopes"] = nb::make_tuple(result.scopes[0], result.scopes[1], result.scopes[2]);
    out["faults"] = faults;
    out["events"] = events;
    out["transitions"] = transitions;
    return out;
}

nb::list run_engine(const std::vector<std::uint64_t>& seeds, std::uint32_t ranks, std::uint32_t requests_per_rank,
                    bool check_engine, nb::object faults, bool stop_at_failure, std::uint32_t trace_lines, bool squeeze,
                    bool counted) {
    EngineSimulationOptions options;
    options.squeeze = squeeze;
    options.counted = counted;
    options.trace_lines = trace_lines;
    options.ranks = ranks;
    options.requests_per_rank = requests_per_rank;
    options.check_engine = check_engine;
    options.own_faults = !faults.is_none();
    if (options.own_faults) options.faults = network_faults_of(nb::cast<nb::dict>(faults));
    std::vector<EngineSimulationResult> results;
    {
        nb::gil_scoped_release released;
        for (const std::uint64_t seed : seeds) {
            options.seed = seed;
            results.push_back(run_engine_simulation(options));
            if (stop_at_failure && !results.back().failure.empty()) break;
        }
    }
    nb::list out;
    for (const EngineSimulationResult& result : results) out.append(to_dict(result));
    return out;
}

// The n-th operation fails, for every n: until a run sees no n-th operation any more.
nb::dict run_engine_nth(std::uint64_t seed, const std::string& how, std::uint32_t ranks,
                        std::uint32_t requests_per_rank, bool counted) {
    EngineSimulationOptions options;
    options.counted = counted;
    options.seed = seed;
    options.ranks = ranks;
    options.requests_per_rank = requests_per_rank;
    options.own_faults = true;
    options.faults.fail_how = nth_named(how);
    std::vector<std::pair<std::uint64_t, std::string>> failures;
    std::uint64_t struck = 0;
    {
        nb::gil_scoped_release released;
        for (std::uint64_t n = 1;; ++n) {
            options.faults.fail_at = n;
            const EngineSimulationResult result = run_engine_simulation(options);
            if (!result.failure.empty()) failures.emplace_back(n, result.failure);
            if (result.posts < n || failures.size() >= 10) break;
            ++struck;
        }
    }
    nb::dict out;
    out["struck"] = struck;
    out["failures"] = nb::cast(failures);
    return out;
}

// An engine whose provider is the test: commands come out, the test says what became of them.
class EngineProbe {
  public:
    EngineProbe(std::uint32_t outstanding_max, std::uint32_t peers, std::uint32_t lanes, bool ordered,
                std::uint64_t hard_timeout_ns, std::uint32_t queued_max, std::uint32_t bulk_window,
                std::uint64_t bulk_hold_ns, std::uint64_t bulk_chunk_bytes, std::uint64_t bulk_post_bytes)
        : engine_(limits(outstanding_max, peers, lanes, hard_timeout_ns, queued_max, bulk_hold_ns, bulk_chunk_bytes,
                         bulk_post_bytes),
                  policy(ordered)),
          lanes_(lanes) {
        for (std::uint32_t peer = 0; peer < peers; ++peer) {
            for (std::uint32_t lane = 0; lane < lanes; ++lane) {
                engine_.open_queue_pair(PeerId{peer}, EndpointId{0}, lane > 0 ? bulk_window : 0);
            }
        }
    }

    // Chunks: a list of lanes, one write (or read) each; those of a bulk lane are neighbours, the first of `lead` bytes
    // where that is not 0. Controls: a list of (lane, scope).
    std::pair<std::string, std::uint64_t> submit(std::uint32_t peer, const std::vector<std::uint32_t>& chunk_lanes,
                                                 const std::vector<std::pair<std::uint32_t, std::uint32_t>>& controls,
                                                 bool reads, std::uint64_t lead) {
        std::vector<ChunkSpec> chunks;
        std::uint64_t at = 0;
        for (const std::uint32_t lane : chunk_lanes) {
            ChunkSpec spec;
            if (reads) spec.kind = OpKind::read;
            spec.queue_pair = QueuePairId{peer * lanes_ + lane};
            spec.local = RegionId{0};
            spec.remote = RemoteRegionId{0};
            spec.bytes = lane == 0 ? 64 : at == 0 && lead > 0 ? lead : 65'536;
            spec.local_offset = spec.remote_offset = lane > 0 ? at : 0;
            at += lane > 0 ? spec.bytes : 0;
            chunks.push_back(spec);
        }
        std::vector<ControlSpec> specs;
        for (const auto& [lane, scope] : controls) {
            ControlSpec spec;
            spec.scope = static_cast<Scope>(scope);
            spec.queue_pair = QueuePairId{peer * lanes_ + lane};
            spec.remote = RemoteRegionId{1};
            spec.operand = 1;
            specs.push_back(spec);
        }
        const Engine::Submitted submitted = engine_.submit(PeerId{peer}, chunks, specs, Level::delivered, now_);
        return {name(submitted.status), submitted.request.pack()};
    }
    // Takes and posts; `outcomes` are used one by one, "posted" when they run out. Returns what was really posted:
    // (ticket, kind, queue pair's peer).
    std::vector<std::pair<std::uint64_t, std::string>> post(std::uint32_t most,
                                                            const std::vector<std::string>& outcomes) {
        std::vector<PostCommand> commands(most);
        const std::size_t count = engine_.take_posts(commands, now_);
        std::vector<std::pair<std::uint64_t, std::string>> posted;
        std::size_t asked = 0;
        posted_bytes_.clear();
        for (std::size_t i = 0; i < count; ++i) {
            if (!engine_.may_post(commands[i])) continue;
            const std::string outcome = asked < outcomes.size() ? outcomes[asked] : "posted";
            ++asked;
            PostResult result;
            if (outcome == "again") result.outcome = PostOutcome::again;
            if (outcome == "failed") result = {PostOutcome::failed, Status::bad_key, 5};
            engine_.on_posted(commands[i], result, now_);
            if (result.outcome != PostOutcome::posted) continue;
            posted_bytes_.push_back(commands[i].bytes);
            posted.emplace_back(commands[i].ticket.pack(), commands[i].kind == OpKind::signal ? "signal" : "write");
        }
        return posted;
    }
    std::vector<std::uint64_t> posted_bytes() const { return posted_bytes_; }  // of the last post()
    void complete(std::uint64_t ticket, const std::string& status, bool delivered) {
        engine_.on_completion({Ticket::unpack(ticket), parse(status), delivered ? Level::delivered : Level::local, 0},
                              now_);
    }
    void advance(std::uint64_t ns) {
        now_ += ns;
        engine_.step(now_);
    }
    // One turn after a pause of `ns`, of at most 64 completions: tickets that wait at the provider. Those it left
    // there.
    std::vector<std::uint64_t> turn_after_pause(std::uint64_t ns, const std::vector<std::uint64_t>& waiting) {
        struct Waiting {
            std::vector<std::uint64_t> left;
            std::size_t poll(std::span<Completion> out, std::vector<Arrival>&) {
                const std::size_t count = std::min(out.size(), left.size());
                for (std::size_t i = 0; i < count; ++i)
                    out[i] = {Ticket::unpack(left[i]), Status::ok, Level::delivered, 0};
                left.erase(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(count));
                return count;
            }
            PostResult post(const PostCommand&) { return {PostOutcome::again, Status::would_block, 0}; }
        } provider{waiting};
        std::vector<Arrival> arrivals;
        now_ += ns;
        pump(engine_, provider, arrivals, now_, 1);
        return provider.left;
    }
    std::string status(std::uint64_t request) const { return name(engine_.status(Ticket::unpack(request))); }
    std::string first_error(std::uint64_t request) const {
        return name(RecordView::unpack(engine_.record(Ticket::unpack(request)).load()).first_error);
    }
    void mark_stalled(std::uint64_t request) { engine_.mark_stalled(Ticket::unpack(request)); }
    std::string cancel(std::uint64_t request) { return name(engine_.cancel(Ticket::unpack(request))); }
    std::string withhold(std::uint64_t request) { return name(engine_.withhold(Ticket::unpack(request))); }
    std::string release(std::uint64_t request) { return name(engine_.release(Ticket::unpack(request))); }
    void peer_dead(std::uint32_t peer) { engine_.on_peer_dead(PeerId{peer}, now_); }
    void peer_closed(std::uint32_t peer) { engine_.on_peer_closed(PeerId{peer}, now_); }
    // The endpoint that holds too much quarantined work, or -1.
    int endpoint_to_replace() const {
        const auto endpoint = engine_.endpoint_to_replace();
        return endpoint ? static_cast<int>(endpoint->value) : -1;
    }
    void replace_endpoint(std::uint32_t old, std::uint32_t fresh) {
        engine_.replace_endpoint(EndpointId{old}, EndpointId{fresh});
    }
    bool drained(std::uint32_t endpoint) const { return engine_.drained(EndpointId{endpoint}); }
    void endpoint_closed(std::uint32_t endpoint) { engine_.on_endpoint_closed(EndpointId{endpoint}, now_); }
    std::string close_peer(std::uint32_t peer) { return name(engine_.close_peer(PeerId{peer}, now_)); }
    std::uint64_t quiet_mark() const { return engine_.quiet_mark(); }
    std::string quiet(std::uint64_t mark) const { return name(engine_.quiet(mark)); }
    std::uint32_t region_uses() const { return engine_.region_uses(RegionId{0}); }
    bool idle() const { return engine_.idle(); }
    std::string invariants() const { return engine_.check_invariants(); }
    nb::dict lane(std::uint32_t peer, std::uint32_t lane) const {
        const QueuePairView view = engine_.view(QueuePairId{peer * lanes_ + lane});
        constexpr std::array<const char*, 5> states{"closed", "open", "aborting", "quarantined", "failed"};
        nb::dict out;
        out["state"] = states[static_cast<std::size_t>(view.state)];
        out["error"] = name(view.error);
        out["generation"] = view.generation;
        out["accepted"] = view.accepted;
        out["posted"] = view.posted;
        out["retired"] = view.retired;
        out["in_flight"] = view.in_flight;
        return out;
    }
    nb::dict statistics() const {
        const EngineStatistics now = engine_.statistics();
        nb::dict out;
        out["slots_counted"] = now.slots_counted;
        out["slots_counted_peak"] = now.slots_counted_peak;
        out["slots_quarantined"] = now.slots_quarantined;
        out["slots_used"] = now.slots_used;
        out["slots_short"] = now.slots_short;
        out["window"] = now.window;
        out["queue_pairs_live"] = now.queue_pairs_live;
        out["completions_stale"] = now.completions_stale;
        out["completions_unknown"] = now.completions_unknown;
        out["gates_closed"] = now.gates_closed;
        out["posts_again"] = now.posts_again;
        out["lanes_reopened"] = now.lanes_reopened;
        out["misuses"] = now.misuses;
        return out;
    }

  private:
    static EngineLimits limits(std::uint32_t outstanding_max, std::uint32_t peers, std::uint32_t lanes,
                               std::uint64_t hard_timeout_ns, std::uint32_t queued_max, std::uint64_t bulk_hold_ns,
                               std::uint64_t bulk_chunk_bytes, std::uint64_t bulk_post_bytes) {
        EngineLimits limits;
        limits.peers_max = peers;
        limits.queue_pairs_max = peers * lanes;
        limits.queue_pairs_per_peer_max = lanes;
        limits.outstanding_max = outstanding_max;
        limits.requests_max = 256;
        limits.queued_max = queued_max;
        limits.held_max = 64;
        limits.regions_max = 4;
        limits.hard_timeout_ns = hard_timeout_ns;
        limits.bulk_hold_ns = bulk_hold_ns;
        limits.bulk_chunk_bytes = bulk_chunk_bytes;
        limits.bulk_post_bytes = bulk_post_bytes;
        return limits;
    }
    static GatePolicy policy(bool ordered) {
        GatePolicy policy;
        if (ordered) policy.ordering = OrderingClass::ordered;
        return policy;
    }
    static std::string name(Status status) { return status_names[static_cast<std::size_t>(status)]; }
    static Status parse(const std::string& status) {
        for (std::size_t i = 0; i < status_names.size(); ++i) {
            if (status == status_names[i]) return static_cast<Status>(i);
        }
        throw nb::value_error(("'" + status + "' is no status").c_str());
    }

    Engine engine_;
    std::uint32_t lanes_;
    std::vector<std::uint64_t> posted_bytes_;
    TimeNs now_ = 0;
};

void bind_probe(nb::module_& module) {
    nb::class_<EngineProbe>(module, "EngineProbe", "One engine whose provider is the caller (unit tests).")
        .def(nb::init<std::uint32_t, std::uint32_t, std::uint32_t, bool, std::uint64_t, std::uint32_t, std::uint32_t,
                      std::uint64_t, std::uint64_t, std::uint64_t>(),
             "outstanding_max"_a = 8, "peers"_a = 2, "lanes"_a = 2, "ordered"_a = false,
             "hard_timeout_ns"_a = 1'000'000, "queued_max"_a = 64, "bulk_window"_a = 0, "bulk_hold_ns"_a = 0,
             "bulk_chunk_bytes"_a = 0, "bulk_post_bytes"_a = 0)
        .def("submit", &EngineProbe::submit, "peer"_a, "chunk_lanes"_a,
             "controls"_a = std::vector<std::pair<std::uint32_t, std::uint32_t>>{}, "reads"_a = false, "lead"_a = 0)
        .def("post", &EngineProbe::post, "most"_a = 64, "outcomes"_a = std::vector<std::string>{})
        .def("posted_bytes", &EngineProbe::posted_bytes)
        .def("complete", &EngineProbe::complete, "ticket"_a, "status"_a = "ok", "delivered"_a = true)
        .def("advance", &EngineProbe::advance, "ns"_a)
        .def("status", &EngineProbe::status, "request"_a)
        .def("first_error", &EngineProbe::first_error, "request"_a)
        .def("cancel", &EngineProbe::cancel, "request"_a)
        .def("withhold", &EngineProbe::withhold, "request"_a)
        .def("release", &EngineProbe::release, "request"_a)
        .def("peer_dead", &EngineProbe::peer_dead, "peer"_a)
        .def("peer_closed", &EngineProbe::peer_closed, "peer"_a)
        .def("mark_stalled", &EngineProbe::mark_stalled, "request"_a)
        .def("turn_after_pause", &EngineProbe::turn_after_pause, "ns"_a, "waiting"_a)
        .def("endpoint_to_replace", &EngineProbe::endpoint_to_replace)
        .def("replace_endpoint", &EngineProbe::replace_endpoint, "old"_a, "fresh"_a)
        .def("drained", &EngineProbe::drained, "endpoint"_a)
        .def("endpoint_closed", &EngineProbe::endpoint_closed, "endpoint"_a)
        .def("close_peer", &EngineProbe::close_peer, "peer"_a)
        .def("quiet_mark", &EngineProbe::quiet_mark)
        .def("quiet", &EngineProbe::quiet, "mark"_a)
        .def("region_uses", &EngineProbe::region_uses)
        .def("idle", &EngineProbe::idle)
        .def("invariants", &EngineProbe::invariants)
        .def("lane", &EngineProbe::lane, "peer"_a, "lane"_a)
        .def("statistics", &EngineProbe::statistics);
}

}  // namespace

void bind_engine_simulation(nb::module_& module) {
    module.def("lead_at", &lead_at, "address"_a);
    module.def("run_engine", &run_engine, "seeds"_a, "ranks"_a = 0, "requests_per_rank"_a = 0, "check_engine"_a = true,
               "faults"_a.none() = nb::none(), "stop_at_failure"_a = false, "trace_lines"_a = 0, "squeeze"_a = false,
               "counted"_a = false,
               "Run the engine's simulation once per seed, with the GIL released. One dict per run; `failure` is empty "
               "where everything held. 0 lets the seed decide. `faults`: probabilities instead of the seed's choice. "
               "`trace`: the last `trace_lines` events in words. `squeeze`: back-pressure from everywhere at once. "
               "`counted`: ordering class C; "
               "`counting`: immediates, signals added, those that had to wait, aborted ones, strays, dropped "
               "messages.");
    module.def(
        "run_engine_nth", &run_engine_nth, "seed"_a, "how"_a, "ranks"_a = 2, "requests_per_rank"_a = 6,
        "counted"_a = false,
        "The n-th operation of the run fails (`how`: one of nth_faults()), and nothing else, for n = 1, 2, … until "
        "there is no n-th one. {'struck': how many there were, 'failures': [(n, text)]}.");
    module.def(
        "nth_faults", [] { return std::vector<std::string>(nth_names.begin(), nth_names.end()); },
        "What may become of the n-th operation.");
    module.def(
        "set_mutant", [](const std::string& name) { active_mutant = mutant_named(name); }, "name"_a,
        "Switch one kept fault on for the whole process ('none' switches it off). ValueError for another name.");
    module.def(
        "mutants",
        [] {
            std::vector<std::string> names;
            for (const NamedMutant& each : named_mutants) names.emplace_back(each.name);
            return names;
        },
        "Names for set_mutant().");
    module.def(
        "transitions",
        [] {
            std::vector<std::string> names;
            for (std::size_t from = 0; from < request_states; ++from) {
                for (const std::uint8_t to : request_table[from]) {
                    if (to == illegal_transition) continue;
                    std::string name = std::string(state_names[from]) + "->" + state_names[to];
                    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
                }
            }
            return names;
        },
        "Every transition of a request that the table allows, as 'FROM->TO'.");
    bind_probe(module);
}

}  // namespace expertwire
